"""From files to files: a checkpoint of any format that is read, written in another, in bounded memory."""

"""Empty: TRL imports it for the packing of examples, which the tests leave out."""

4 b1 b2 c7 d3

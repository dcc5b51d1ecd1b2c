"""Numbers to bits and back: bit packing, affine quantiser, Lloyd-Max codebooks, random rotations."""

"""The radiance field: fields, samplers and backgrounds of the cells."""

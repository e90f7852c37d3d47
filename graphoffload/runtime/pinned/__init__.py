"""Page-locked host memory: slabs, buffers of exact size cut from them, and memory taken while a plan compiles."""

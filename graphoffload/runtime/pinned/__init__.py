"""Page-locked host memory: slabs, buffers of exact size cut from them, and memory allocated while a plan compiles."""

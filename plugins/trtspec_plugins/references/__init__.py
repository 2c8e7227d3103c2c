"""What each kernel computes, said plainly in float64 NumPy: the meaning its tests hold it to."""

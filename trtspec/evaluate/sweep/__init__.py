"""Many runs from one YAML file: every target × data set × temperature × draft length × concurrency.

schema.py    the file, at the YAML edge
cells.py     the runs it stands for, each a command line of `trtspec eval` and a run folder
run.py       making those that are not made yet, one after the other in this process
on_ray.py    … or side by side on the nodes of a Ray cluster

The run folders are all the state there is: a finished one is left as it is, an unfinished one goes on from its journal,
whoever works on it next.
"""

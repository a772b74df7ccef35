"""A program and its tests in two processes, between which values cross; neither reads the memory of the other.

`rlhf.verifiers.sandbox` runs the files of this folder in two sandboxes: in one process the program is executed, in the
other its tests, which alone write the verdict. The tests use the program's functions and objects through a socket:

- Plain values, such as numbers, texts and lists of them, are copied. A list that a call gets and changes is changed on
  the other side too.
- Any other object stays in its process. The other process has a `RemoteObject`, which asks for every operation.

The tests' process takes nothing but values from the program's: it reads JSON, and makes plain values, exceptions and
remote objects of it. It compares an object with a plain value itself, by a copy of the object's own plain value: an
object whose `==` is always true equals none. The program can call what the tests pass to it, and nothing else.

A new process runs these files for each program. So they import nothing of the rest of the project, and of the standard
library only what is quick: the module typing would take as long as the start of Python.
"""

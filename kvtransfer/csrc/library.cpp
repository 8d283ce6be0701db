// Everything that is called from Python, in one shared library.

#include "copy.cpp"
#include "flow.cpp"

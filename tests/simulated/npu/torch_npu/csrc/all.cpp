// One unit: the headers of torch take most of the time, and are read once.
#include "runtime.cpp"
#include "kernels.cpp"
#include "collectives.cpp"

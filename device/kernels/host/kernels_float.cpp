#include "host_library.h"

FOR_EACH_OPERATION(float, float32)
FOR_EACH_OPERATION(double, float64)

#include "host_library.h"

FOR_EACH_OPERATION(int32_t, int32)
FOR_EACH_OPERATION(int64_t, int64)

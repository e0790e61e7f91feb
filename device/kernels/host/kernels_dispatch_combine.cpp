#include "dispatch_combine.h"

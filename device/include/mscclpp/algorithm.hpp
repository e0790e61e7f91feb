#include "mscclpp/gpu_data_types.hpp"

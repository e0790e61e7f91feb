#include "moves.h"

// CuPy 13 includes this header, CuPy 14 the other.
#pragma once
#include "config/namespace.h"

// CuPy's module cupy.cuda.thrust shows this version.
#pragma once
#define THRUST_VERSION 200000

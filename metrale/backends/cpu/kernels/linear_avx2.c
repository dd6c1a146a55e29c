#include "simd_avx2.h"

#include "variant.inc"

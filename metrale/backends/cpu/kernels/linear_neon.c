#include "simd_neon.h"

#include "variant.inc"

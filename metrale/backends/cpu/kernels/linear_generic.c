#include "simd_generic.h"

#include "variant.inc"

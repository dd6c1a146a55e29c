#include "simd_neon.h"

#include "abi.h"
#include "activation.inc"
#include "attention.h"
#include "attention.inc"
#include "kv.inc"

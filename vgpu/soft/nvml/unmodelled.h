/* unmodelled.h - what every export without a model does. */
#ifndef SOFT_NVML_UNMODELLED_H
#define SOFT_NVML_UNMODELLED_H

#include "library.h"

/* Counts the call in the state and refuses: NOT_SUPPORTED, before nvmlInit UNINITIALIZED. */
nvmlReturn_t nvml_unmodelled(const char *symbol);

#endif

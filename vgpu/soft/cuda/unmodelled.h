/* unmodelled.h - what every export without a model does. */
#ifndef SOFT_UNMODELLED_H
#define SOFT_UNMODELLED_H

#include "driver.h"

/* Counts the call in the state and refuses: NOT_SUPPORTED, before cuInit NOT_INITIALIZED. */
CUresult soft_unmodelled(const char *symbol);

#endif

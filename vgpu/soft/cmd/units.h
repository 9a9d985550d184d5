/* units.h - sizes and durations as people write them, and JSON texts. */
#ifndef SOFT_UNITS_H
#define SOFT_UNITS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* 512B, 100KiB, 8000MiB, 8GiB; a bare number is bytes. False for anything else, and for what needs more than 64 bits. */
bool units_bytes(const char *text, uint64_t *out);

/* 20us, 2ms, 1s, 5m; 0 may stand alone. */
bool units_nanoseconds(const char *text, uint64_t *out);

bool units_number(const char *text, uint64_t *out);

/* Writes text as a JSON string, quotes and all. */
void json_text(FILE *to, const char *text);

#endif

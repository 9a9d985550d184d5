/* SPDX-License-Identifier: Apache-2.0 */
/* uuid.h: NVML's text form of a card's UUID. */
#ifndef CARVE_UUID_H
#define CARVE_UUID_H

#include <stdbool.h>
#include <stdint.h>

enum { CARVE_UUID_TEXT = 41 }; /* "GPU-", 36 characters and the end */

static inline void carve_uuid_write(const uint8_t uuid[16], char text[CARVE_UUID_TEXT]) {
    static const char digits[] = "0123456789abcdef";
    char *at = text;
    *at++ = 'G';
    *at++ = 'P';
    *at++ = 'U';
    *at++ = '-';
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10) {
            *at++ = '-';
        }
        *at++ = digits[uuid[i] >> 4];
        *at++ = digits[uuid[i] & 15];
    }
    *at = '\0';
}

/* Reads "GPU-" or "MIG-" and the 32 digits, with or without dashes between them. */
static inline bool carve_uuid_read(const char *text, uint8_t uuid[16]) {
    bool card = text[0] == 'G' && text[1] == 'P' && text[2] == 'U' && text[3] == '-';
    bool instance = text[0] == 'M' && text[1] == 'I' && text[2] == 'G' && text[3] == '-';
    if (!card && !instance) {
        return false;
    }
    int n = 0;
    for (const char *at = text + 4; *at != '\0'; at++) {
        int digit;
        if (*at >= '0' && *at <= '9') {
            digit = *at - '0';
        } else if (*at >= 'a' && *at <= 'f') {
            digit = *at - 'a' + 10;
        } else if (*at >= 'A' && *at <= 'F') {
            digit = *at - 'A' + 10;
        } else if (*at == '-') {
            continue;
        } else {
            return false;
        }
        if (n == 32) {
            return false;
        }
        uuid[n / 2] = (uint8_t)(n % 2 == 0 ? digit << 4 : uuid[n / 2] | digit);
        n++;
    }
    return n == 32;
}

#endif

/* procaddress.h - the table of exports, generated from tables/cuda_exports.tbl. */
#ifndef SOFT_PROCADDRESS_H
#define SOFT_PROCADDRESS_H

typedef enum { EXPORT_ANY = 0, EXPORT_LEGACY = 1, EXPORT_THREAD = 2 } export_stream;

typedef struct {
  const char *symbol;
  const char *base;     /* the name that cuGetProcAddress knows it by, NULL: none */
  unsigned int since;   /* first CUDA version for which that name means this symbol */
  export_stream stream; /* what stream zero means in it */
  int branch;           /* first driver branch that exports it */
  void (*address)(void);
} export_row;

extern const export_row export_table[];
extern const unsigned int export_count;

#endif

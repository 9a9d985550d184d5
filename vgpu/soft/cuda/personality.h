/* personality.h - what differs between driver releases, one object per release. */
#ifndef SOFT_PERSONALITY_H
#define SOFT_PERSONALITY_H

extern const int soft_branch;       /* 550 */
extern const int soft_cuda_version; /* 12040 */
extern const int soft_ptx_version;  /* 84 */

#endif

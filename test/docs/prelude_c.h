#include <hvd/c/hvd.h>
#include <stdio.h>

/* What the C blocks of the pages use and leave out; see prelude.h. */
int failed(const char* what);

#include <hvd/c/hvd.h>
#include <stdio.h>

/* The names that the C blocks of the pages use and do not declare; see prelude.h. */
int failed(const char* what);

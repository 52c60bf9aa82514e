/* Variables of a task that are for the guest, and must have no effect on a program on the host. */
#ifndef LOADER_H
#define LOADER_H

#include <stddef.h>
#include <string.h>

/* What the plugin puts in front of such a variable's name, and mventer takes off for the guest. */
#define KEPT_PREFIX "MULTIVERSE_KEPT_"

/* Whether the dynamic loader or the C library of a program here would load what the variable names. */
static inline int is_for_the_loader(const char *variable)
{
	static const char *const loaders[] = {"LD_", "GCONV_PATH=", "GLIBC_TUNABLES="};

	for (size_t i = 0; i < sizeof loaders / sizeof *loaders; i++)
		if (!strncmp(variable, loaders[i], strlen(loaders[i])))
			return 1;
	return 0;
}

#endif

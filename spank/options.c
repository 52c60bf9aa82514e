/* Checks the options for a job's VMs: those of a command line, and the same in a job's comment. */
#define _GNU_SOURCE
#include "options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct vm_option vm_options[COUNT] = {
	{"vm-image", "NAME", "run this job's tasks in a VM of that image", "image", "image"},
	{"vcpu-per-vm", "N", "virtual CPUs of each of the job's VMs (default: the job's cores, divided)", "cpus", "vcpu"},
	{"memory-per-vm", "SIZE", "memory of each of the job's VMs, in MiB or with K, M, G, T (default: what the job's allows)",
	 "memory", "memory"},
	{"disk-size", "SIZE", "what a VM's users may write to its disk, in MiB or with K, M, G, T", "disk", "disk"},
	{"vm-per-node", "N", "VMs of the job on each of its nodes (default: 1)", "vms", "per-node"},
	{"sriov", "N", "virtual functions (SR-IOV) of the node that each of the job's VMs has (default: 1)", "functions",
	 "sriov"},
	{"ivshmem", "N", "regions of memory that the job's VMs on a node share, one for each MPI job that runs at a time",
	 "regions", "ivshmem"},
};

char values[COUNT][65];
char problem[1024];

/* MiB of a size like 512, 512M or 2G, rounded up; 0 if it is none. */
static unsigned long long size_of(const char *text)
{
	char *end;
	unsigned long long number;

	if (*text < '0' || *text > '9')
		return 0;
	errno = 0;
	number = strtoull(text, &end, 10);
	if (errno || number > 1ULL << 40)
		return 0;
	switch (*end ? *end++ : 'M') {
	case 'k': case 'K': number = (number + 1023) >> 10; break;
	case 'm': case 'M': break;
	case 'g': case 'G': number <<= 10; break;
	case 't': case 'T': number <<= 20; break;
	default: return 0;
	}
	return *end || number > 1ULL << 32 ? 0 : number;
}

static int is_image(const char *text)
{
	size_t length = strlen(text);

	return length && length < sizeof values[0] && text[0] != '.' && text[0] != '-' &&
	       strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == length;
}

/* Keeps an option's value. NULL, or what the value has to be. */
static const char *mistake(int which, const char *value)
{
	unsigned long long number = 0;
	char *end = NULL;

	if (which == IMAGE) {
		if (!is_image(value))
			return "an image's name has letters, digits and ._- only";
		strcpy(values[IMAGE], value);
		return NULL;
	}
	if (which == FUNCTIONS && (!*value || !strcmp(value, "(null)"))) /* what Slurm makes of an option without a value */
		value = "1";
	if (which == CPUS || which == VMS || which == REGIONS || which == FUNCTIONS) {
		number = *value >= '0' && *value <= '9' ? strtoull(value, &end, 10) : 0;
		if (!end || *end || !number ||
		    number > (which == VMS         ? MOST_VMS
			      : which == REGIONS   ? MOST_REGIONS
			      : which == FUNCTIONS ? MOST_FUNCTIONS
						   : 4096))
			return which == VMS         ? "it is a number of VMs, from 1 to 64"
			       : which == REGIONS   ? "it is a number of regions of shared memory, from 1 to 32"
			       : which == FUNCTIONS ? "it is a number of virtual functions, from 1 to 4"
						    : "it is a number of virtual CPUs, at least 1";
	} else if (!(number = size_of(value))) {
		return "it is a size in MiB, or with K, M, G or T after it";
	}
	snprintf(values[which], sizeof values[which], "%llu", number);
	return NULL;
}

/* Checks and keeps an option's value. 0, or -1 with the reason in `problem`. */
int take_option(int which, const char *value)
{
	const char *wrong = mistake(which, value ? value : "");

	if (!wrong)
		return 0;
	snprintf(problem, sizeof problem, "--%s=%.200s: %s", vm_options[which].name, value ? value : "", wrong);
	return -1;
}

/* Keeps what is asked for by one part of the comment's words, such as vcpu=2; why it is wrong in `problem`. */
static void take_part(const char *part)
{
	const char *equals = strchrnul(part, '='), *wrong = "use image, per-node, vcpu, memory, disk, sriov or ivshmem";

	for (int i = 0; i < COUNT; i++) {
		if (strlen(vm_options[i].word) != (size_t)(equals - part) ||
		    strncmp(part, vm_options[i].word, (size_t)(equals - part)))
			continue;
		wrong = *values[i] ? "give it once" : mistake(i, *equals ? equals + 1 : "");
		break;
	}
	if (wrong && !*problem)
		snprintf(problem, sizeof problem, "vm:%.200s in --comment: %s", part, wrong);
}

/* Reads what a comment asks for, as multiverse_jobs.lua does at submission: whether it asks for a VM. */
int take_comment(const char *comment)
{
	char *copy = strdup(comment), *rest = copy, *word, *part;
	int asked = 0;

	while ((word = strsep(&rest, " \t\n\v\f\r"))) {
		if (strncmp(word, "vm:", 3))
			continue;
		word += 3;
		while ((part = strsep(&word, ","))) {
			if (*part) {
				asked = 1;
				take_part(part);
			}
		}
	}
	free(copy);
	return asked;
}

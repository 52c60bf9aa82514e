/* The options for a job's VMs, as SPANK plugin and launcher have them. */
#ifndef OPTIONS_H
#define OPTIONS_H

#define NAME "multiverse"
#define MOST_VMS 64 /* as in agent/job_protocol.py */
#define MOST_FUNCTIONS 4 /* as there */
#define MOST_REGIONS 32 /* as there */

enum { IMAGE, CPUS, MEMORY, DISK, VMS, FUNCTIONS, REGIONS, COUNT };

/* `key` is for the agent, and in the record of a job; `word` in a comment: vm:image=slim,vcpu=2 */
struct vm_option { const char *name, *argument, *usage, *key, *word; };

extern const struct vm_option vm_options[COUNT];
extern char values[COUNT][65];  /* as the agent reads them: an image's name, numbers in MiB; empty if not given */
extern char problem[1024];      /* why this task cannot run in its VM */

int take_option(int which, const char *value);
int take_comment(const char *comment);

#endif

/*
 * VMs inside a job without a plugin of Slurm: what the steps of a batch file call.
 *
 *     srun --ntasks-per-node=1 multiverse-vm launch [--vm-image=NAME] …    makes the job's VMs on each of its nodes
 *     srun multiverse-vm run -- ./app                                     runs a command in them
 *     srun --ntasks-per-node=1 multiverse-vm list                         prints their names and addresses
 *     srun --ntasks-per-node=1 multiverse-vm reclaim                      gives them back, as the end of the job does
 *
 * The options are those of the plugin. Without any of them, the job's comment says what is wanted, such as
 * vm:image=slim,vcpu=2. The agent of the host knows the job by the control groups that this process is in. A command runs in
 * a VM or not at all.
 */
#define _GNU_SOURCE
#include "client.h"
#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <libgen.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SOCKET "MULTIVERSE_JOBS_SOCKET" /* the agent's, if it is not the usual one */
#define SHORT_LIMIT 60                  /* seconds for an answer that needs no VM to be made */

enum { TIMEOUT = COUNT, JOB, VM, OPTIONS };

extern char **environ;

static const char *agent = "/run/multiverse/jobs.sock";
static char told[LONGEST_ANSWER];

__attribute__((format(printf, 1, 2))) static _Noreturn void fail(const char *format, ...)
{
	va_list arguments;

	fprintf(stderr, "multiverse: ");
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fprintf(stderr, "\n");
	exit(1);
}

static _Noreturn void explain(int status)
{
	FILE *to = status ? stderr : stdout;

	fprintf(to, "usage: srun --ntasks-per-node=1 multiverse-vm launch [OPTIONS]   make the job's VMs on its nodes\n"
		    "       srun multiverse-vm run [--vm=I] -- COMMAND...            run a command in them\n"
		    "       srun --ntasks-per-node=1 multiverse-vm list              print their names and addresses\n"
		    "       srun --ntasks-per-node=1 multiverse-vm reclaim           give them back before the job ends\n"
		    "       multiverse-vm reclaim --job=ID                           (root) the same, in an epilog of the site\n"
		    "Options of launch, which the comment of the job can have in their place (--comment=vm:image=NAME,vcpu=N):\n");
	for (int i = 0; i < COUNT; i++)
		fprintf(to, "  --%s=%s\t%s\n", vm_options[i].name, vm_options[i].argument, vm_options[i].usage);
	fprintf(to, "  --timeout=SECONDS\thow long to wait for the VMs (default: 300); a template may have to be built\n");
	exit(status);
}

/* Options up to the first word that is none. Its index. */
static int take_options(int count, char *argv[], const char *given[OPTIONS])
{
	static const struct { int which; const char *name; } own[] = {{TIMEOUT, "timeout"}, {JOB, "job"}, {VM, "vm"}};
	struct option all[OPTIONS + 2] = {{"help", no_argument, NULL, OPTIONS}};
	int which;

	for (int i = 0; i < COUNT; i++)
		all[i + 1] = (struct option){
			vm_options[i].name, i == FUNCTIONS ? optional_argument : required_argument, NULL, i,
		};
	for (size_t i = 0; i < sizeof own / sizeof *own; i++)
		all[COUNT + 1 + i] = (struct option){own[i].name, required_argument, NULL, own[i].which};
	while ((which = getopt_long(count, argv, "+", all, NULL)) != -1) {
		if (which == OPTIONS)
			explain(0);
		if (which == '?')
			explain(2);
		given[which] = optarg ? optarg : "";
	}
	return optind;
}

/* A number that an option has; `most` is its limit. */
static unsigned long number_of(const char *name, const char *text, unsigned long most)
{
	char *end = NULL;
	unsigned long number = *text >= '0' && *text <= '9' ? strtoul(text, &end, 10) : 0;

	if (!end || *end || number > most)
		fail("--%s=%.100s: it is a number of at most %lu", name, text, most);
	return number;
}

static void only(const char *operation, const char *given[OPTIONS], int first, int last)
{
	for (int i = 0; i < OPTIONS; i++)
		if (given[i] && (i < first || i > last))
			fail("multiverse-vm %s has no such option; see multiverse-vm --help", operation);
}

/* The names and addresses of what the agent has told, a VM on each line. */
static void print_vms(void)
{
	char *rest = told, *word;

	strsep(&rest, " "); /* the job */
	strsep(&rest, " "); /* its regions */
	while ((word = strsep(&rest, " "))) {
		char *equals = strchr(word, '=');

		if (equals)
			printf("%.*s %s\n", (int)(equals - word), word, equals + 1);
	}
}

/* The paper's configuration reader and launcher. */
static void launch(const char *given[OPTIONS])
{
	char request[LONGEST_ANSWER] = "launch";
	int asked = 0, limit = given[TIMEOUT] ? (int)number_of("timeout", given[TIMEOUT], 86400) : 300;

	only("launch", given, 0, TIMEOUT);
	for (int i = 0; i < COUNT; i++) {
		if (!given[i])
			continue;
		asked = 1;
		if (take_option(i, given[i]))
			fail("%s", problem);
	}
	if (!asked) {
		if (ask(agent, SHORT_LIMIT, "comment\n", told))
			fail("no VM can be launched: %s", problem);
		take_comment(told);
		if (*problem)
			fail("%s", problem);
	}
	for (int i = 0; i < COUNT; i++)
		snprintf(request + strlen(request), sizeof request - strlen(request), " %s=%s", vm_options[i].key, values[i]);
	strcat(request, "\n");
	if (ask(agent, limit, request, told))
		fail("no VM can be launched: %s", problem);
	print_vms();
}

static void reclaim(const char *given[OPTIONS])
{
	char request[64] = "reclaim\n";

	only("reclaim", given, JOB, JOB);
	if (given[JOB])
		snprintf(request, sizeof request, "release job=%lu\n", number_of("job", given[JOB], 0x03FFFFFF));
	if (ask(agent, SHORT_LIMIT, request, told))
		fail("the VMs of this job cannot be given back now: %s", problem);
}

/* How many tasks this step has on this node, by Slurm's list such as 2(x3),1. */
static unsigned count_tasks(void)
{
	const char *list = getenv("SLURM_TASKS_PER_NODE"), *id = getenv("SLURM_NODEID");
	unsigned long node = id ? strtoul(id, NULL, 10) : 0;

	while (list && *list >= '0' && *list <= '9') {
		char *end;
		unsigned long tasks = strtoul(list, &end, 10), times = 1;

		if (!strncmp(end, "(x", 2))
			times = strtoul(end + 2, &end, 10), end += *end == ')';
		if (node < times)
			return (unsigned)tasks;
		node -= times;
		list = *end == ',' ? end + 1 : end;
	}
	return 1;
}

static void find_mventer(char path[PATH_MAX])
{
	static const char *const places[] = {"mventer", "../libexec/multiverse/mventer"};
	char own[PATH_MAX] = "", *directory;
	ssize_t length = readlink("/proc/self/exe", own, sizeof own - 1);

	directory = length > 0 ? dirname(own) : ".";
	for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
		snprintf(path, PATH_MAX, "%.4000s/%s", directory, places[i]);
		if (!access(path, X_OK))
			return;
	}
}

/* Becomes mventer, which runs the command in the VM of this task. */
static void run(const char *given[OPTIONS], int count, char *argv[])
{
	const char *local = getenv("SLURM_LOCALID");
	char path[PATH_MAX], vm[16], *job = told, *rest = told, **environment, **whole;
	unsigned vms = 0, which;
	int used = 0;

	only("run", given, VM, VM);
	if (!count)
		fail("which command is to run in the VM is missing; see multiverse-vm --help");
	if (ask(agent, SHORT_LIMIT, "list\n", told))
		fail("this task cannot run in a VM: %s", problem);
	strsep(&rest, " ");
	if (rest)
		snprintf(values[REGIONS], sizeof values[REGIONS], "%.4s", strsep(&rest, " "));
	for (; rest; vms++)
		strsep(&rest, " ");
	which = given[VM] ? (unsigned)number_of("vm", given[VM], vms - 1)
			  : vm_of(local ? (unsigned)strtoul(local, NULL, 10) : 0, count_tasks(), vms);
	if (vms > 1 && has_pmi(environ))
		fail("this task cannot run in a VM: srun's MPI knows nothing of several VMs on a node; "
		     "use --mpi=none, or launch one VM on each node (--vm-per-node=1)");
	snprintf(values[VMS], sizeof values[VMS], "%u", vms);
	snprintf(vm, sizeof vm, "%u", which);
	find_mventer(path);
	if (!(environment = keep_for_guest(environ)) || !(whole = calloc((size_t)count + 6, sizeof *whole)))
		fail("this task cannot run in a VM: %s", strerror(errno));
	whole[used++] = path;
	whole[used++] = (char *)agent;
	whole[used++] = job;
	whole[used++] = vm;
	whole[used++] = "step";
	memcpy(whole + used, argv, (size_t)count * sizeof *argv);
	execve(path, whole, environment);
	fail("this task cannot run in a VM: cannot execute %s: %s", path, strerror(errno));
}

int main(int count, char *argv[])
{
	const char *given[OPTIONS] = {NULL}, *operation = count > 1 ? argv[1] : "";
	int first;

	if (getenv(SOCKET))
		agent = getenv(SOCKET);
	if (!strcmp(operation, "--help") || !strcmp(operation, "-h"))
		explain(0);
	first = count > 1 ? 1 + take_options(count - 1, argv + 1, given) : count;
	if (!strcmp(operation, "run"))
		run(given, count - first, argv + first);
	else if (first < count)
		explain(2);
	else if (!strcmp(operation, "launch"))
		launch(given);
	else if (!strcmp(operation, "reclaim"))
		reclaim(given);
	else if (!strcmp(operation, "list") && !ask(agent, SHORT_LIMIT, "list\n", told))
		print_vms();
	else if (!strcmp(operation, "list"))
		fail("%s", problem);
	else
		explain(2);
	return 0;
}

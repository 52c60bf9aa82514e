/*
 * SPANK plugin of Multiverse: VMs inside a job's allocation.
 *
 * A job that was submitted with one of our options, or with the same in its comment, has VMs on its nodes, and its tasks
 * run in these. The job's prolog records the options in a file, so that each step of the job is such a step, whatever its
 * environment says. A task asks the agent of the host for the VMs before it gives up root's rights, and then executes
 * mventer in place of its command. The epilog releases the VMs.
 *
 * A node without this plugin would run such a job without a VM. So job_submit.lua gives the job a feature as a constraint,
 * which a node gets from its agent, after Slurm has loaded this plugin there for a test.
 *
 * Other jobs pay the look-up of one file. No hook starts a process or holds a lock, no failure here drains a node, and
 * each wait has a limit. See docs/decisions/vms-inside-jobs.md#d0057.
 */
#define _GNU_SOURCE
#include "client.h"
#include "options.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

#define EXPORTED __attribute__((visibility("default")))
#define LONGEST_LIST 3072 /* bytes */
#define PROTOCOL 1 /* of what plugin and agent say to each other: agent/job_protocol.py has the same */
#define TEST "MULTIVERSE_PLUGIN_TEST" /* set by the agent, which runs srun --help to test the plugin */

EXPORTED extern const char plugin_name[], plugin_type[];
EXPORTED extern const unsigned int plugin_version, spank_plugin_version;
SPANK_PLUGIN(multiverse, 1)

static struct spank_option options[COUNT]; /* as Slurm wants them: see describe_options */
static char nodes[LONGEST_LIST]; /* of the job, as Slurm writes them; empty if that is longer */
static char node[256];           /* this one's name */
static char answer[LONGEST_ANSWER]; /* of the agent */
static int is_ours;              /* whether this process's job has a VM */

/* Arguments in plugstack.conf. */
static const char *agent = "/run/multiverse/jobs.sock";
static const char *records = "/run/multiverse/jobs";
static const char *enter = "/usr/libexec/multiverse/mventer";
static const char *feature = "job-vms";
static const char *vfio = "/dev/vfio"; /* another one in tests */
static int timeout = 300; /* seconds for a VM: its template may have to be built */

enum { CANCEL_TRIES = 60, CANCEL_PAUSE = 5 }; /* seconds */
static const int release_timeout = 60, test_timeout = 10;

static void read_arguments(int count, char *arguments[])
{
	for (int i = 0; i < count; i++) {
		if (!strncmp(arguments[i], "agent=", 6))
			agent = arguments[i] + 6;
		else if (!strncmp(arguments[i], "records=", 8))
			records = arguments[i] + 8;
		else if (!strncmp(arguments[i], "enter=", 6))
			enter = arguments[i] + 6;
		else if (!strncmp(arguments[i], "timeout=", 8))
			timeout = atoi(arguments[i] + 8);
		else if (!strncmp(arguments[i], "vfio=", 5))
			vfio = arguments[i] + 5;
		else if (!strncmp(arguments[i], "feature=", 8))
			feature = arguments[i] + 8;
		else
			slurm_error(NAME ": plugstack.conf: unknown argument %s", arguments[i]);
	}
}

/* --- options ------------------------------------------------------------------------------------------------------ */

/* Checks and keeps an option's value: at submission, and in a step to which it was handed on. */
static int take(int which, const char *value, int remote)
{
	(void)remote;
	if (!take_option(which, value))
		return 0;
	slurm_error(NAME ": %s", problem);
	return -1;
}

static void describe_options(void)
{
	for (int i = 0; i < COUNT; i++)
		options[i] = (struct spank_option){
			(char *)vm_options[i].name, (char *)vm_options[i].argument, (char *)vm_options[i].usage,
			i == FUNCTIONS ? 2 : 1, i, take, /* its value may be left out, as with getopt_long(3) */
		};
}

/* --- the record of a job ------------------------------------------------------------------------------------------ */

static void path_of(char *path, size_t size, uint32_t job, const char *suffix)
{
	snprintf(path, size, "%s/%u%s", records, job, suffix);
}

/* Fills `values` from the record of a job, or `problem`, if the prolog found one. 1 if there is a record, 0 if there is none,
 * -1 if it cannot be read. */
static int read_record(uint32_t job)
{
	char path[PATH_MAX], line[LONGEST_LIST + 1024], *rest = line, *word;
	FILE *file;

	path_of(path, sizeof path, job, "");
	if (!(file = fopen(path, "re")))
		return errno == ENOENT ? 0 : -1;
	if (!fgets(line, sizeof line, file))
		*line = 0;
	fclose(file);
	if (!strncmp(line, "error ", 6)) {
		line[strcspn(line, "\n")] = 0;
		snprintf(problem, sizeof problem, "%.1000s", line + 6);
		return 1;
	}
	while ((word = strsep(&rest, " \n"))) {
		if (!strncmp(word, "nodes=", 6))
			snprintf(nodes, sizeof nodes, "%s", word + 6);
		else if (!strncmp(word, "node=", 5))
			snprintf(node, sizeof node, "%s", word + 5);
		for (int i = 0; i < COUNT; i++) {
			size_t length = strlen(vm_options[i].key);

			if (!strncmp(word, vm_options[i].key, length) && word[length] == '=')
				snprintf(values[i], sizeof values[i], "%s", word + length + 1);
		}
	}
	return 1;
}

/* Records a job: what `problem` says, if anything, and else `values`. 0, or -1 with the reason in errno and no record. */
static int write_record(uint32_t job)
{
	char path[PATH_MAX], line[LONGEST_LIST + 1024];
	const char *all = getenv("SLURM_NODELIST"), *own = getenv("SLURMD_NODENAME"); /* slurmd's, not the user's */
	int fd, length = 0, done;

	if (mkdir(records, 0755) && errno != EEXIST)
		return -1;
	path_of(path, sizeof path, job, "");
	if ((fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) < 0)
		return -1;
	if (*problem)
		length = snprintf(line, sizeof line, "error %s\n", problem);
	for (int i = 0; i < COUNT && !*problem; i++)
		length += snprintf(line + length, sizeof line - (size_t)length, "%s=%s ", vm_options[i].key, values[i]);
	if (!*problem)
		length += snprintf(line + length, sizeof line - (size_t)length, "nodes=%s node=%.255s\n",
				   all && strlen(all) < LONGEST_LIST ? all : "", own ? own : "");
	errno = ENOSPC; /* if only a part is written */
	done = write(fd, line, (size_t)length) == length;
	if (close(fd) || !done) {
		int reason = errno;

		unlink(path);
		errno = reason;
		return -1;
	}
	return 0;
}

/* How many numbers are in a list like 0-3,8. */
static unsigned count_of(const char *list)
{
	unsigned found = 0;

	while (list && *list >= '0' && *list <= '9') {
		char *end;
		unsigned long first = strtoul(list, &end, 10), last = first;

		if (*end == '-')
			last = strtoul(end + 1, &end, 10);
		found += last >= first ? (unsigned)(last - first) + 1 : 0;
		list = *end == ',' ? end + 1 : end;
	}
	return found;
}

/*
 * The IOMMU groups whose device files this process may open, as 4,7: where Slurm keeps jobs to the devices that it gave to
 * them, access(2) asks the job's control group too (devcgroup_inode_permission in Linux), and opens nothing.
 */
static void list_groups(char *list, size_t size)
{
	DIR *directory = *values[FUNCTIONS] ? opendir(vfio) : NULL;
	struct dirent *entry;
	size_t used = 0;

	*list = 0;
	while (directory && (entry = readdir(directory))) {
		size_t length = strlen(entry->d_name);

		if (strspn(entry->d_name, "0123456789") != length || used + length + 2 > size ||
		    faccessat(dirfd(directory), entry->d_name, R_OK | W_OK, 0))
			continue;
		used += (size_t)snprintf(list + used, size - used, "%s%s", used ? "," : "", entry->d_name);
	}
	if (directory)
		closedir(directory);
}

/* Asks for the VMs of the job. They are there for the second task and for later steps. */
static void provide(spank_t spank, uint32_t job)
{
	char request[2 * LONGEST_LIST + 1024], groups[LONGEST_LIST], *cores = NULL;
	uint64_t memory = 0;
	uid_t uid = (uid_t)-1;

	spank_get_item(spank, S_JOB_UID, &uid);
	spank_get_item(spank, S_JOB_ALLOC_CORES, &cores);
	spank_get_item(spank, S_JOB_ALLOC_MEM, &memory);
	list_groups(groups, sizeof groups);
	snprintf(request, sizeof request,
		 "provide job=%u uid=%u cores=%u allocated=%llu image=%s cpus=%s memory=%s disk=%s vms=%s "
		 "functions=%s groups=%s regions=%s nodes=%s node=%s\n",
		 job,
		 (unsigned)uid, count_of(cores), memory >= NO_VAL64 ? 0ULL : (unsigned long long)memory,
		 values[IMAGE], values[CPUS], values[MEMORY], values[DISK], values[VMS], values[FUNCTIONS], groups,
		 values[REGIONS], nodes, node);
	ask(agent, timeout, request, answer);
}

/* --- hooks -------------------------------------------------------------------------------------------------------- */

static uint32_t job_of(spank_t spank)
{
	uint32_t job = 0;

	return spank_get_item(spank, S_JOB_ID, &job) == ESPANK_SUCCESS ? job : 0;
}

/* Forgets options that were handed on to the user's shell by a job that it runs in: they are not those of a new job. */
static void forget_options_of_others(void)
{
	char name[128];

	for (int i = 0; i < COUNT; i++) {
		snprintf(name, sizeof name, "_SLURM_SPANK_OPTION_" NAME "_%s", options[i].name);
		for (char *at = name; *at; at++)
			*at = *at == '-' ? '_' : *at;
		unsetenv(name);
	}
}

/* Tells the agent, which runs srun --help for it, whether jobs can have VMs on this node: that Slurm loads this plugin and
 * with which arguments, that a job can be recorded, and that the agent answers. */
static void test(void)
{
	char path[PATH_MAX];

	if (access(enter, X_OK)) {
		snprintf(problem, sizeof problem, "cannot execute %s: %s", enter, strerror(errno));
	} else if (write_record(0)) {
		snprintf(problem, sizeof problem, "cannot record jobs in %s: %s", records, strerror(errno));
	} else {
		path_of(path, sizeof path, 0, "");
		unlink(path);
		ask(agent, test_timeout, "test\n", answer);
	}
	printf(NAME "-plugin protocol=%d feature=%s records=%s\n", PROTOCOL, feature, records);
	printf(NAME "-plugin %s\n", *problem ? problem : "works");
	*problem = 0;
}

EXPORTED int slurm_spank_init(spank_t spank, int count, char *arguments[])
{
	spank_context_t context = spank_context();

	read_arguments(count, arguments);
	describe_options();
	if (context == S_CTX_LOCAL && getenv(TEST))
		test();
	if (context == S_CTX_ALLOCATOR)
		forget_options_of_others();
	for (int i = 0; i < COUNT; i++)
		if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
			slurm_error(NAME ": cannot register --%s", options[i].name);
	return 0;
}

static int has_word(const char *list, const char *word)
{
	size_t length = strlen(word);

	for (; list && *list; list += strcspn(list, ","), list += *list == ',')
		if (strcspn(list, ",") == length && !strncmp(list, word, length))
			return 1;
	return 0;
}

/*
 * In srun: tells mventer of --task-prolog, of which slurmstepd says nothing to plugins. slurmstepd would run it after
 * task_init, so it does not run it for our tasks. srun exports its options, and the function that knows them by name.
 * Variables that begin with SLURM_ reach tasks with --export=NONE, too.
 */
static void hand_on_prolog(void)
{
	static const char name[] = "SLURM_MULTIVERSE_TASK_PROLOG";
	char *(*get)(void *, const char *), *value = NULL;
	void *given = dlsym(RTLD_DEFAULT, "opt");

	*(void **)&get = dlsym(RTLD_DEFAULT, "slurm_option_get");
	if (get && given)
		value = get(given, "task-prolog");
	if (value && *value && strcmp(value, "invalid-context"))
		setenv(name, value, 1);
	else
		unsetenv(name); /* of the step that this srun is in */
}

/* At submission: Slurm refuses a job whose feature no node has with a message that names neither feature nor reason. */
EXPORTED int slurm_spank_init_post_opt(spank_t spank, int count, char *arguments[])
{
	spank_context_t context = spank_context();
	node_info_msg_t *all = NULL;
	int given = 0, found = 0;

	(void)spank;
	(void)count;
	(void)arguments;
	for (int i = 0; i < COUNT; i++)
		given |= *values[i];
	if (context == S_CTX_LOCAL)
		hand_on_prolog();
	if (!given || !(context == S_CTX_ALLOCATOR || (context == S_CTX_LOCAL && !getenv("SLURM_JOB_ID"))) ||
	    slurm_load_node(0, &all, SHOW_ALL))
		return 0;
	for (uint32_t i = 0; i < all->record_count; i++)
		found |= has_word(all->node_array[i].features_act, feature);
	slurm_free_node_info_msg(all);
	if (!found)
		slurm_error(NAME ": no node can run a job in a VM now, because none has the feature %s, which the agent of a "
			    "node sets after a test: ask an administrator to read the agent's log", feature);
	return 0;
}

/* A job that is to have a VM, and cannot be recorded, must not run: its steps would not know. Failing here would drain the
 * node. */
static void cancel(uint32_t job, const char *reason)
{
	char message[1024];

	snprintf(message, sizeof message, NAME ": the job is cancelled, because its VM cannot be recorded in %s: %s", records,
		 reason);
	slurm_error("%s (job %u)", message, job);
	slurm_notify_job(job, message);
	/* Slurm starts the job's steps after this, so slurmctld may be away for a while. */
	for (int tries = CANCEL_TRIES; slurm_kill_job(job, SIGKILL, 0); sleep(CANCEL_PAUSE)) {
		if (errno == ESLURM_ALREADY_DONE || errno == ESLURM_INVALID_JOB_ID)
			return;
		if (!--tries) {
			slurm_error(NAME ": job %u cannot be cancelled: %s", job, slurm_strerror(errno));
			return;
		}
	}
}

/* On each node of a job, before its first step. */
EXPORTED int slurm_spank_job_prolog(spank_t spank, int count, char *arguments[])
{
	const char *comment = getenv("SLURM_JOB_COMMENT"); /* from the job's credential, not from its user */
	uint32_t job = job_of(spank);
	int given = 0;

	read_arguments(count, arguments);
	describe_options();
	for (int i = 0; i < COUNT; i++) {
		char *value = NULL;

		if (spank_option_getopt(spank, &options[i], &value) == ESPANK_SUCCESS) {
			given = 1;
			take(i, value, 1);
		}
	}
	if (!given && comment)
		given = take_comment(comment);
	if (job && given && write_record(job))
		cancel(job, strerror(errno));
	return 0;
}

/* In each task, as root. Its errors are for task_init: from here, they would not reach the user. */
EXPORTED int slurm_spank_task_init_privileged(spank_t spank, int count, char *arguments[])
{
	uint32_t job = job_of(spank);
	int recorded, given = 0;

	read_arguments(count, arguments);
	for (int i = 0; i < COUNT; i++)
		given |= *values[i];
	*problem = 0; /* of an option that was handed on: the record decides */
	recorded = job ? read_record(job) : 0;
	is_ours = given || recorded;
	if (recorded < 0)
		snprintf(problem, sizeof problem, "the record of this job in %s cannot be read", records);
	else if (given && !recorded) /* nobody would release its VM */
		snprintf(problem, sizeof problem, "this job has no record on this node; give the options for its VM to sbatch or "
			 "salloc, not to srun in the job");
	else if (is_ours && !*problem)
		provide(spank, job);
	return 0;
}

/* In each task, as the user, in place of the command that follows. */
EXPORTED int slurm_spank_task_init(spank_t spank, int count, char *arguments[])
{
	char **argv = NULL, **environment = NULL, **whole, number[16], vm[16];
	uint32_t job = job_of(spank), step = 0, tasks = 1;
	unsigned vms = *values[VMS] ? (unsigned)atoi(values[VMS]) : 1;
	int argc = 0, used = 0, task = 0, chosen = -1;

	(void)count;
	(void)arguments;
	if (!is_ours)
		return 0;
	if (!*problem) {
		spank_get_item(spank, S_JOB_STEPID, &step);
		spank_get_item(spank, S_TASK_ID, &task);
		spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &tasks);
		if (spank_get_item(spank, S_JOB_ENV, &environment) != ESPANK_SUCCESS)
			environment = NULL;
		if (step != SLURM_BATCH_SCRIPT)
			chosen = chosen_vm(environment, vms);
	}
	if (!*problem) {
		if (spank_get_item(spank, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1 || !environment ||
		    !(environment = keep_for_guest(environment)) || !(whole = calloc((size_t)argc + 6, sizeof *whole))) {
			snprintf(problem, sizeof problem, "the command of this task is unknown");
		} else if (vms > 1 && step != SLURM_BATCH_SCRIPT && has_pmi(environment)) {
			snprintf(problem, sizeof problem, "srun's MPI knows nothing of several VMs on a node; "
				 "start it by mpirun, use --mpi=none, or submit the job with --vm-per-node=1");
		} else {
			snprintf(number, sizeof number, "%u", job);
			snprintf(vm, sizeof vm, "%u", chosen >= 0 ? (unsigned)chosen : vm_of(task < 0 ? 0 : (unsigned)task, tasks, vms));
			whole[used++] = (char *)enter;
			whole[used++] = (char *)agent;
			whole[used++] = number;
			whole[used++] = vm;
			whole[used++] = step == SLURM_BATCH_SCRIPT ? "script" : "command";
			memcpy(whole + used, argv, (size_t)argc * sizeof *argv);
			execve(enter, whole, environment);
			snprintf(problem, sizeof problem, "cannot execute %s: %s", enter, strerror(errno));
		}
	}
	/* An error of an optional plugin would count as success, and the task would run on the bare node. */
	fprintf(stderr, NAME ": this task cannot run in a VM: %s\n", problem);
	fflush(stderr);
	_exit(1);
}

/* Kills what is in the control groups of the job's VMs. The agent lists these in a file, a directory on each line. */
static void kill_listed(uint32_t job, const char *suffix)
{
	char path[PATH_MAX], directory[PATH_MAX - 16], line[32];
	FILE *list, *group;

	path_of(path, sizeof path, job, suffix);
	if (!(list = fopen(path, "re")))
		return;
	while (fgets(directory, sizeof directory, list)) {
		directory[strcspn(directory, "\n")] = 0;
		snprintf(path, sizeof path, "%s/cgroup.procs", directory);
		if (!(group = fopen(path, "re")))
			continue;
		while (fgets(line, sizeof line, group))
			if (atoi(line) > 1)
				kill(atoi(line), SIGKILL);
		fclose(group);
	}
	fclose(list);
}

/* On each node of a job, after its last step. */
EXPORTED int slurm_spank_job_epilog(spank_t spank, int count, char *arguments[])
{
	char path[PATH_MAX], request[64];
	uint32_t job = job_of(spank);

	read_arguments(count, arguments);
	path_of(path, sizeof path, job, "");
	if (!job || access(path, F_OK))
		return 0;
	snprintf(request, sizeof request, "release job=%u\n", job);
	/* Slurm gives the node no job meanwhile, so an agent that does not answer at all is not waited for so long. */
	if (ask(agent, test_timeout, "test\n", answer) || ask(agent, release_timeout, request, answer)) {
		slurm_error(NAME ": the VMs of job %u are killed: %s", job, problem);
		kill_listed(job, ".groups");
		kill_listed(job, ".making"); /* that were not finished */
	}
	unlink(path); /* the next agent removes the VMs of jobs without a record */
	return 0;
}

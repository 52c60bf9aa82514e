"""Builds Slurm's plugin from its source with a main function, and with stand-ins for what Slurm offers to plugins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SPANK = Path(__file__).parents[2] / "spank"

needs_plugin = pytest.mark.skipif(
    shutil.which("cc") is None or not Path("/usr/include/slurm/spank.h").exists(),
    reason="there is no C compiler, or Slurm's headers are missing",
)

_SLURM = """
spank_context_t spank_context(void)
{
	const char *context = getenv("CONTEXT");

	return context ? !strcmp(context, "sbatch") ? S_CTX_ALLOCATOR : S_CTX_LOCAL : S_CTX_JOB_SCRIPT;
}
spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...)
{
	va_list arguments;

	va_start(arguments, item);
	if (item == S_JOB_ID)
		*va_arg(arguments, uint32_t *) = 7;
	va_end(arguments);
	return item == S_JOB_ID ? ESPANK_SUCCESS : ESPANK_ERROR;
}
spank_err_t spank_getenv(spank_t spank, const char *name, char *to, int size) { return ESPANK_ERROR; }
spank_err_t spank_option_register(spank_t spank, struct spank_option *option) { return ESPANK_ERROR; }
spank_err_t spank_option_getopt(spank_t spank, struct spank_option *option, char **value)
{
	return (*value = getenv(option->name)) ? ESPANK_SUCCESS : ESPANK_ERROR;
}
void slurm_error(const char *format, ...) {}
char *slurm_strerror(int number) { return "an error"; }
int slurm_load_node(time_t since, node_info_msg_t **nodes, uint16_t flags) { return -1; }
void slurm_free_node_info_msg(node_info_msg_t *nodes) {}
int slurm_notify_job(uint32_t job, char *message) { return printf("notify %u %s\\n", job, message) < 0; }
int slurm_kill_job(uint32_t job, uint16_t number, uint16_t flags) { return printf("kill %u %u\\n", job, number) < 0; }
"""


def build(directory: Path, main: str) -> Path:
    """The program, in this directory. Options of the job are environment variables such as `vm-image`; its id is 7.
    The command that loads the plugin is in CONTEXT: `sbatch`, `srun`, or by default that of a prolog."""
    (directory / "main.c").write_text(f'#include "{SPANK}/multiverse.c"\n#include <stdarg.h>\n{_SLURM}\n{main}')
    program = directory / "plugin"
    sources = [directory / "main.c", SPANK / "options.c", SPANK / "client.c"]
    subprocess.run(["cc", "-std=gnu11", "-o", program, *sources], check=True)
    return program

-- Multiverse's part of job_submit.lua: sends jobs to the gate and refuses what cannot be served.
-- slurmctld holds its locks while this runs, so it touches nothing but a few tiny files of its own machine.

local multiverse = {}
local site = dofile("/etc/slurm/multiverse_site.lua")

local NO_VAL, NO_VAL16 = 4294967294, 65534
local PENDING = 0 -- the base state of a waiting job (slurm.h)

local function number(value, unset)
  if type(value) ~= "number" or value == unset or value >= NO_VAL - 1 then return nil end
  return value
end

local function ceil_div(a, b) return math.floor((a + b - 1) / b) end

local function words(text, separators)
  local found = {}
  for word in string.gmatch(text or "", "[^" .. separators .. "]+") do found[#found + 1] = word end
  return found
end

local function default_partition(partitions)
  for name, partition in pairs(partitions or {}) do
    if partition.flag_default == 1 then return name end
  end
  return nil
end

local function ours(name) return name == site.gate_partition or name == site.run_partition end

local function any_ours(text)
  for _, name in ipairs(words(text, ",")) do
    if ours(name) then return true end
  end
  return false
end

-- What no VM has or can be given, and what to do instead. Slurm would take most of these and ignore them.
local UNSERVED = {
  { "burst_buffer", "burst buffers are not served: stage files in the job itself, without --bb and --bbf" },
  { "container", "--container is not served: ask for an image with --constraint" },
  { "cpu_freq_min", "a VM does not set its host's clock: submit without --cpu-freq" },
  { "cpu_freq_max", "a VM does not set its host's clock: submit without --cpu-freq" },
  { "cpu_freq_gov", "a VM does not set its host's clock: submit without --cpu-freq" },
  { "contiguous", "VMs have no neighbours: submit without --contiguous" },
  { "cpus_per_tres", "generic resources are not served: submit without GPUs" },
  { "delay_boot", "a VM has its features from its start: submit without --delay-boot" },
  { "exc_nodes", "nodes are made for each job: submit without --exclude" },
  { "mem_per_tres", "generic resources are not served: submit without GPUs" },
  { "network", "--network is not served: a VM has one network" },
  { "power_flags", "--power is not served: submit without it" },
  { "prefer", "--prefer is not served: ask with --constraint" },
  { "reboot", "each VM is fresh: submit without --reboot" },
  { "req_nodes", "nodes are made for each job: submit without --nodelist" },
  { "req_switch", "VMs have no switches: submit without --switches" },
  { "reservation", "reservations are not served: submit without --reservation" },
  { "tres_per_job", "generic resources are not served: submit without GPUs" },
  { "tres_per_node", "generic resources are not served: submit without --gres and GPUs" },
  { "tres_per_socket", "generic resources are not served: submit without GPUs" },
  { "tres_per_task", "generic resources are not served: submit without GPUs" },
  -- After the GPUs themselves, which from 24.05 on bring them along.
  { "tres_bind", "generic resources are not served: submit without --gpu-bind" },
  { "tres_freq", "generic resources are not served: submit without --gpu-freq" },
}
-- Bits of bitflags (slurm.h, from 22.05 to 24.11): what --gres-flags asks for, the last three from 23.11 on.
local SPREAD, GRES_FLAGS = 2 ^ 8, { 2 ^ 4, 2 ^ 19, 2 ^ 38, 2 ^ 39, 2 ^ 40 }

-- Whether a field holds a wish. Unset ones are 0, or the greatest numbers of their width; from 23.11 on
-- --cpus-per-task is in tres_per_task, too.
local function asked(value)
  if type(value) == "string" then return value ~= "" and not string.find(value, "^cpu[=:]%d+$") end
  return type(value) == "number" and value > 0 and value ~= NO_VAL16 and value < NO_VAL - 1
end

local function has_bit(value, bit)
  return type(value) == "number" and type(bit) == "number" and math.floor(value / bit) % 2 == 1
end

-- What is wrong with a job's wishes about features and nodes, or nil.
local function wrong_wishes(job)
  local features = job.features or ""
  for _, word in ipairs(words(features, "&,|%[%]%(%)%s")) do
    if string.sub(word, 1, 3) == "mv_" or word == site.gate_feature then
      return "the constraint " .. word .. " is Multiverse's own: submit without it"
    end
  end
  if string.find(features, "[|%[%]%(%)%*!]") then
    return "alternatives and counts in --constraint are not served: join features with &"
  end
  for _, row in ipairs(UNSERVED) do
    if asked(job[row[1]]) then return row[2] end
  end
  if has_bit(job.bitflags, SPREAD) then return "--spread-job is not served: say how many VMs with --nodes" end
  for _, bit in ipairs(GRES_FLAGS) do
    if has_bit(job.bitflags, bit) then return "generic resources are not served: submit without --gres-flags" end
  end
  if has_bit(job.bitflags, slurm.STEPMGR_ENABLED) then -- a name that Slurm has from 24.05 on
    return "--stepmgr is not served: submit without it"
  end
  if string.find(job.script or "", "\n#[BD][BW]%s") then
    return "burst buffers are not served: stage files in the job itself, without #BB and #DW"
  end
  if job.shared == 1 then return "a VM is its job's own: submit without --oversubscribe" end
  if job.immediate == 1 then return "a VM is made once its job waits: submit without --immediate" end
  if job.min_mem_per_node == 0 then
    return "--mem=0 asks for all of a node, and a VM is as large as its job asks: say how much with --mem"
  end
  return nil
end

-- What is wrong with a job's wishes about sockets, cores and threads, or nil. A VM has one socket with a core for
-- each CPU, and one thread in each core.
local function wrong_topology(job)
  local threads = number(job.threads_per_core, NO_VAL16) or 1
  local per_core = type(job.ntasks_per_core) == "number" and job.ntasks_per_core ~= NO_VAL16 and job.ntasks_per_core
  if (number(job.sockets_per_node, NO_VAL16) or 1) > 1 then
    return "a VM has one socket: submit without --sockets-per-node, or ask for CPUs with --mincpus"
  end
  if threads > 1 or (per_core or 1) > 1 then
    return "a VM's cores have one thread each: submit without --threads-per-core, --ntasks-per-core and --hint"
  end
  if asked(job.threads_per_core) and number(job.cores_per_socket, NO_VAL16) == 1 then
    return "--hint=memory_bound is not served: a VM has as many cores as its job asks for"
  end
  if asked(job.ntasks_per_socket) then return "a VM has one socket: ask with --ntasks-per-node" end
  return nil
end

-- The job's nodes, CPUs of each, tasks and memory of each, as far as they are known.
local function sizes(job)
  local tasks = number(job.num_tasks, NO_VAL)
  local tasks_per_node = number(job.ntasks_per_node, NO_VAL16)
  local nodes = number(job.min_nodes, NO_VAL)
  if not nodes or nodes == 0 then nodes = tasks and tasks_per_node and ceil_div(tasks, tasks_per_node) or 1 end
  local per_task = math.max(number(job.cpus_per_task, NO_VAL16) or 1, 1)
  local tasks_here = math.max(tasks_per_node or 0, ceil_div(tasks or 1, nodes))
  local cpus = math.max(tasks_here * per_task, number(job.pn_min_cpus, NO_VAL16) or 1,
                        number(job.cores_per_socket, NO_VAL16) or 1,
                        ceil_div(number(job.min_cpus, NO_VAL) or 1, nodes))
  local memory = number(job.min_mem_per_node, nil)
  if not memory or memory == 0 then memory = (number(job.min_mem_per_cpu, nil) or site.memory_per_cpu) * cpus end
  return nodes, cpus, memory
end

-- Whether an instant clone of an image is what the job asks for; any_image, any_kind: also if it names none.
local function wants(job, image, any_image, any_kind)
  local says_image, kinds = any_image, 0
  for _, word in ipairs(words(job.features, "&,%s")) do
    if word == image then says_image = true
    elseif word == "instant" or word == "auto" then kinds = kinds + 1
    else return false end
  end
  return says_image and (kinds == 1 or kinds == 0 and any_kind)
end

-- Whether a job may pass by the gate: that is open, and whatever holds there holds where jobs run.
local GOVERNED = { "allow_accounts", "allow_alloc_nodes", "allow_groups", "allow_qos", "deny_accounts", "deny_qos",
                   "qos", "max_time", "default_time", "max_nodes", "min_nodes", "max_share", "max_cpus_per_node",
                   "max_mem_per_cpu", "max_mem_per_node", "def_mem_per_cpu", "def_mem_per_node" }
local UP = 3 -- PARTITION_UP (slurm.h)

local function may_pass(partitions)
  local gate, run = (partitions or {})[site.gate_partition], (partitions or {})[site.run_partition]
  if not gate or not run or gate.state_up ~= UP or run.state_up ~= UP then return false end
  for _, field in ipairs(GOVERNED) do
    if gate[field] ~= run[field] then return false end
  end
  return true
end

-- The feature of a spare that is this job's from now on, or nil: an idle node that fits it, on offer in the list that
-- the controller keeps. To rename its file is to take it; only one can. A job that would not start now takes none.
local function take_spare(job, partitions)
  local list = io.open(site.inbox .. "/spares/list")
  if not list then return nil end
  local lines = words(list:read("*a"), "\n")
  list:close()
  if (tonumber(lines[1]) or 0) < os.time() then return nil end -- no controller is there to let its user in
  if job.priority == 0 or asked(job.dependency) or asked(job.array_inx) or asked(job.licenses)
    or (number(job.begin_time, nil) or 0) > os.time() then return nil end
  local nodes, cpus, memory = sizes(job)
  local room = number(job.pn_min_tmp_disk, NO_VAL) or 0
  if nodes ~= 1 or not may_pass(partitions) then return nil end
  local most = number(partitions[site.run_partition].max_mem_per_cpu, nil) or 0
  if most > 0 and memory > most * cpus then return nil end -- Slurm would give it more CPUs
  for row = 2, #lines do
    local node, feature, image, any_image, any_kind, has_cpus, has_memory, has_disk = string.match(lines[row],
      "^(%S+) (%S+) (%S+) ([01]) ([01]) (%d+) (%d+) (%d+)$")
    if node and cpus == tonumber(has_cpus) and memory <= tonumber(has_memory) and room <= tonumber(has_disk)
      and wants(job, image, any_image == "1", any_kind == "1")
      and os.rename(site.inbox .. "/spares/open." .. node, site.inbox .. "/spares/taken." .. node) then
      return feature
    end
  end
  return nil
end

-- What is too large about a job, with what would fit, or nil.
local function too_large(job)
  local nodes, cpus, memory = sizes(job)
  local room = number(job.pn_min_tmp_disk, NO_VAL) or 0
  if room > site.max_disk then
    return string.format("the job asks for %d MiB on disk with --tmp; a VM has %d MiB: use a shared file system",
      room, site.max_disk)
  end
  if cpus <= site.max_cpus and memory <= site.max_memory then
    if nodes * cpus <= site.total_cpus and nodes * (memory + site.reserve) <= site.total_memory then return nil end
    return string.format("the job asks for %d nodes of %d CPUs and %d MiB; all hosts together have %d CPUs and"
      .. " %d MiB, of which each VM needs %d MiB for itself: ask for fewer or smaller nodes",
      nodes, cpus, memory, site.total_cpus, site.total_memory, site.reserve)
  end
  return string.format("the job asks for %d CPUs and %d MiB on one node; the largest VM for a job here has"
    .. " %d CPUs and %d MiB: ask for less per node, or spread the job over more nodes with -N",
    cpus, memory, site.max_cpus, site.max_memory)
end

-- More tasks than CPUs: only --overcommit makes such a job, and no field says so.
local function overcommitted(job)
  local tasks, cpus = number(job.num_tasks, NO_VAL), number(job.min_cpus, NO_VAL)
  if tasks and cpus and tasks > cpus then
    return "--overcommit is not served: ask for a CPU for each task, and overcommit in the job with srun"
  end
  return nil
end

-- How many VMs a job gets is settled here: Slurm guesses for a waiting job, and its guess changes.
local function settle(job)
  local nodes, cpus = sizes(job)
  job.min_nodes, job.max_nodes = nodes, nodes
  if asked(job.cores_per_socket) then job.pn_min_cpus = cpus end
end

local function refuse(sentence)
  slurm.log_user("%s", sentence)
  return slurm.ERROR
end

-- An empty file with a fixed name: however many jobs come while nobody looks, it stays one file.
local function hint()
  local file = io.open(site.inbox .. "/submit", "w")
  if file then file:close() end
end

local function submit(job, partition, partitions)
  if #words(partition, ",") > 1 then
    return refuse("several partitions are not served: name " .. site.gate_partition .. " alone")
  end
  if partition == site.run_partition then
    return refuse("submit to partition " .. site.gate_partition .. ": jobs are moved on from there by themselves")
  end
  if job.user_id == 0 then
    return refuse("Multiverse runs no job as root: submit as a user, e.g. sbatch --uid=NAME")
  end
  if number(job.het_job_offset, NO_VAL) then
    return refuse("heterogeneous jobs are not served: submit their parts as jobs of their own")
  end
  local sentence = wrong_wishes(job) or wrong_topology(job) or overcommitted(job) or too_large(job)
  if sentence then return refuse(sentence) end
  settle(job)
  local spare = take_spare(job, partitions)
  if spare then job.partition = site.run_partition end
  local mark = spare or site.gate_feature
  if job.features and job.features ~= "" then
    job.features = job.features .. "&" .. mark
  else
    job.features = mark
  end
  hint()
  return slurm.SUCCESS
end

-- The sizes that a job has after a change; its record keeps fewer of them than a submission has.
local function changed(job, record)
  local memory = (job.min_mem_per_node or job.min_mem_per_cpu) and job or record
  return {
    min_nodes = number(job.min_nodes, NO_VAL) or record.min_nodes,
    min_cpus = number(job.min_cpus, NO_VAL) or record.min_cpus,
    pn_min_cpus = number(job.pn_min_cpus, NO_VAL16) or record.pn_min_cpus,
    min_mem_per_node = memory.min_mem_per_node,
    min_mem_per_cpu = memory.min_mem_per_cpu,
    num_tasks = job.num_tasks,
    cpus_per_task = job.cpus_per_task,
    ntasks_per_node = job.ntasks_per_node,
    cores_per_socket = job.cores_per_socket,
    pn_min_tmp_disk = job.pn_min_tmp_disk,
  }
end

local function modify(job, record)
  local wanted = job.partition or ""
  if not ours(record.partition) then
    return refuse("submit the job to partition " .. site.gate_partition .. " instead")
  end
  if wanted ~= "" and wanted ~= record.partition then
    return refuse("this job's partition is Multiverse's to change: cancel it and submit it anew")
  end
  if job.features or job.req_nodes then
    return refuse("a submitted job's constraint and nodes are fixed: cancel it and submit it anew")
  end
  local nodes = number(job.min_nodes, NO_VAL)
  if nodes and record.job_state % 256 ~= PENDING then
    return refuse("a running job keeps its VMs: cancel it and submit it anew")
  end
  local sentence = wrong_wishes(job) or wrong_topology(job) or too_large(changed(job, record))
  if sentence then return refuse(sentence) end
  if nodes then job.max_nodes = nodes end
  hint()
  return slurm.SUCCESS
end

-- After an error nothing is known of a job of ours, and what is not refused here Slurm takes and ignores.
local function guarded(what, ...)
  local fine, answer = pcall(what, ...)
  if fine then return answer end
  slurm.log_error("multiverse: %s", tostring(answer))
  return refuse("Multiverse cannot look at this job, so it is refused: tell an administrator, whom slurmctld's log tells why")
end

-- Jobs of other partitions pass before anything is done that could fail.
function multiverse.submit(job, partitions, uid)
  local partition = job.partition or default_partition(partitions)
  if not any_ours(partition) then return slurm.SUCCESS end
  return guarded(submit, job, partition, partitions)
end

function multiverse.modify(job, record, partitions, uid)
  if site.administrators[uid] then return slurm.SUCCESS end
  if not ours(record.partition) and not any_ours(job.partition) then return slurm.SUCCESS end
  return guarded(modify, job, record)
end

return multiverse

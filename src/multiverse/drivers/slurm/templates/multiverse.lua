-- Multiverse's part of job_submit.lua. It sends jobs to the gate and refuses jobs that Multiverse does not support.
-- slurmctld holds its locks while this code runs, so the code uses nothing but a few small local files.

local multiverse = {}
local site = dofile("{{ directory }}/multiverse_site.lua")
local inside = dofile("{{ directory }}/multiverse_jobs.lua") -- VMs inside jobs of other partitions

local NO_VAL, NO_VAL16, INFINITE = 4294967294, 65534, 4294967295
local NICE_OFFSET = 2147483648 -- the field of a nice value of 0 (slurm.h)
local PENDING = 0 -- the base state of a waiting job (slurm.h)
local KINDS = { instant = true, linked = true, full = true, auto = true } -- kinds of clones, as features

-- Slurm's own errors (slurm_errno.h, the same numbers from 22.05 to 25.11): the last line that a user sees, and after an
-- update with 22.05, which drops messages then, the only one. Lua knows few of their names before 23.02.
local ERROR = {
  partition = 2000, -- Invalid partition name specified
  user = 2010, -- Invalid user id
  size = 2014, -- Requested node configuration is not available
  node_name = 2018, -- Invalid node name specified
  feature = 2029, -- Invalid feature specification
  unsupported = 2036, -- Requested operation not supported on this system
  memory = 2044, -- Memory required by task is not available
  licence = 2048, -- Invalid license specification
  reservation = 2053, -- Requested reservation is invalid
  closed = 2070, -- Required partition not available (inactive or drain)
  gres = 2072, -- Invalid generic resource (gres) specification
  immediate = 2078, -- Job can not start immediately
  internal = 2090, -- Slurm internal error, contact system administrator
  burst_buffer = 2094, -- Burst Buffer request invalid
  threads = 2132, -- Cannot request more threads per core than the job allocation
  prefer = 2133, -- Invalid preferred feature specification
}

-- The value of a numeric field; nil if the field is unset.
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

local function has_word(text, separators, wanted)
  for _, word in ipairs(words(text, separators)) do
    if word == wanted then return true end
  end
  return false
end

local function default_partition(partitions)
  for name, partition in pairs(partitions or {}) do
    if partition.flag_default == 1 then return name end
  end
  return nil
end

local function ours(name) return name == site.partition end

local function any_ours(text)
  for _, name in ipairs(words(text, ",")) do
    if ours(name) then return true end
  end
  return false
end

-- Fields of options that Multiverse does not support, with the message for the user and Slurm's error, unless that is
-- "unsupported". Slurm would accept most of these options and ignore them. A field that a release of Slurm does not have is
-- nil there (core_spec and thread_spec before 26.05).
local UNSUPPORTED = {
  { "burst_buffer", "burst buffers are not supported: stage files in the job itself, without --bb and --bbf", "burst_buffer" },
  { "container", "--container is not supported: select an image with --constraint" },
  { "cpu_freq_min", "a VM cannot set the CPU frequency of its host: submit without --cpu-freq" },
  { "cpu_freq_max", "a VM cannot set the CPU frequency of its host: submit without --cpu-freq" },
  { "cpu_freq_gov", "a VM cannot set the CPU frequency of its host: submit without --cpu-freq" },
  { "core_spec", "specialized cores are not supported: submit without --core-spec and --thread-spec" },
  { "cpus_per_tres", "generic resources are not supported: submit without GPUs", "gres" },
  { "delay_boot", "the features of a VM never change: submit without --delay-boot" },
  { "mem_per_tres", "generic resources are not supported: submit without GPUs", "gres" },
  { "network", "--network is not supported: a VM has one network" },
  { "power_flags", "--power is not supported: submit without it" },
  { "prefer", "--prefer is not supported: use --constraint instead", "prefer" },
  { "reboot", "each VM is new: submit without --reboot" },
  { "req_nodes", "nodes are created for each job: submit without --nodelist", "node_name" },
  { "req_switch", "VMs are connected to no network switch: submit without --switches" },
  { "reservation", "reservations are not supported: submit without --reservation", "reservation" },
  { "thread_spec", "specialized cores are not supported: submit without --core-spec and --thread-spec" },
  { "tres_per_job", "generic resources are not supported: submit without GPUs", "gres" },
  { "tres_per_node", "generic resources are not supported: submit without --gres and GPUs", "gres" },
  { "tres_per_socket", "generic resources are not supported: submit without GPUs", "gres" },
  { "tres_per_task", "generic resources are not supported: submit without GPUs", "gres" },
  -- After the GPUs themselves: from 24.05 on Slurm sets these fields for every job with GPUs.
  { "tres_bind", "generic resources are not supported: submit without --gpu-bind", "gres" },
  { "tres_freq", "generic resources are not supported: submit without --gpu-freq", "gres" },
}
-- Variables that sbatch writes into the job's environment, for options that no field holds.
local UNSUPPORTED_VARIABLES = {
  { "SLURM_PROFILE", "profiles of VMs are not supported: submit without --profile, and unset SLURM_PROFILE" },
  { "SLURM_CONTAINER_ID", "--container-id is not supported: select an image with --constraint" },
}
-- Bits of bitflags (slurm.h, from 22.05 to 24.11): --spread-job and --gres-flags. The last three are used from 23.11 on.
local SPREAD, GRES_FLAGS = 2 ^ 8, { 2 ^ 4, 2 ^ 19, 2 ^ 38, 2 ^ 39, 2 ^ 40 }

-- Whether the user set a field. Unset fields are 0 or the greatest numbers of their width. From 23.11 on tres_per_task
-- holds --cpus-per-task, too.
local function is_set(value)
  if type(value) == "string" then return value ~= "" and not string.find(value, "^cpu[=:]%d+$") end
  return type(value) == "number" and value > 0 and value ~= NO_VAL16 and value < NO_VAL - 1
end

local function has_bit(value, bit)
  return type(value) == "number" and type(bit) == "number" and math.floor(value / bit) % 2 == 1
end

-- Why the job's features and nodes are not supported, with Slurm's error; or nil.
local function unsupported_option(job)
  local features = job.features or ""
  for _, word in ipairs(words(features, "&,|%[%]%(%)%s")) do
    if string.sub(word, 1, 3) == "mv_" or word == site.gate_feature then
      return "the constraint " .. word .. " is reserved for Multiverse: submit without it", "feature"
    end
  end
  if string.find(features, "[|%[%]%(%)%*!]") then
    return "alternatives and counts in --constraint are not supported: join features with &", "feature"
  end
  for _, row in ipairs(UNSUPPORTED) do
    if is_set(job[row[1]]) then return row[2], row[3] end
  end
  if has_bit(job.bitflags, SPREAD) then return "--spread-job is not supported: give the number of VMs with --nodes" end
  for _, bit in ipairs(GRES_FLAGS) do
    if has_bit(job.bitflags, bit) then
      return "generic resources are not supported: submit without --gres-flags", "gres"
    end
  end
  if has_bit(job.bitflags, slurm.STEPMGR_ENABLED) then -- a name that Slurm has from 24.05 on
    return "--stepmgr is not supported: submit without it"
  end
  if string.find(job.script or "", "\n#[BD][BW]%s") then
    return "burst buffers are not supported: stage files in the job itself, without #BB and #DW", "burst_buffer"
  end
  if job.min_mem_per_node == 0 then
    return "--mem=0 (all memory of a node) is not supported: give the size with --mem", "memory"
  end
  return nil
end

-- Drop options that ask for nothing, or for what is true of every VM. A VM runs one job only, and the name of one that is
-- gone never comes again, so a list of nodes that the job does not want excludes none. Slurm would refuse a list with the
-- name of a VM that is gone.
local REQUESTED = { "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task" }

local function asks_for_none(text) -- such as gres:gpu:0
  for _, word in ipairs(words(text, ",")) do
    if not string.find(word, "[:=]0+$") then return false end
  end
  return text ~= ""
end

local function drop_what_holds_anyway(job)
  if is_set(job.exc_nodes) then job.exc_nodes = "" end
  if is_set(job.contiguous) then
    job.contiguous = 0
    slurm.log_user("%s", "--contiguous changes nothing: VMs are connected to one network")
  end
  if job.shared == 1 then
    job.shared = NO_VAL16
    slurm.log_user("%s", "--oversubscribe changes nothing: a VM runs one job only")
  end
  for _, field in ipairs(REQUESTED) do
    if type(job[field]) == "string" and asks_for_none(job[field]) then job[field] = "" end
  end
end

-- Why a variable in the job's environment shows an option that is not supported, or nil. Slurm gives an environment for
-- batch jobs only. In a job, sbatch inherits the variables of that job: the controller decides then.
local function unsupported_variable(job)
  if not job.script or not job.environment or job.environment.SLURM_JOB_ID then return nil end
  for _, row in ipairs(UNSUPPORTED_VARIABLES) do
    local value = job.environment[row[1]]
    if is_set(value) and string.lower(value) ~= "none" then return row[2] end
  end
  return nil
end

-- The name of the placement policy that a feature asks for, or nil.
local function placement(word) return string.match(word, "^place%-(.*)$") end

-- Why there is no such placement policy, or nil.
local function unknown_placement(name)
  for _, known in ipairs(site.placements) do
    if name == known then return nil end
  end
  return string.format("there is no placement policy %s: use --constraint=place-NAME with one of %s", name,
    table.concat(site.placements, ", "))
end

-- Why the job's features do not tell which VMs it is to have, or nil.
local function ambiguous_features(job)
  local found = {}
  for _, word in ipairs(words(job.features, "&,%s")) do
    local message = placement(word) and unknown_placement(placement(word))
    if message then return message end
    local what = placement(word) and "placement policy" or KINDS[word] and "kind of clone" or "image"
    if found[what] and found[what] ~= word then
      return string.format("a job has one %s, not %s and %s: name one of them with --constraint", what, found[what], word)
    end
    found[what] = word
  end
  return nil
end

-- Why the requested sockets, cores and threads are not supported, or nil. A core of a VM has one thread.
local function unsupported_topology(job)
  local threads = number(job.threads_per_core, NO_VAL16) or 1
  local per_core = type(job.ntasks_per_core) == "number" and job.ntasks_per_core ~= NO_VAL16 and job.ntasks_per_core
  if threads > 1 or (per_core or 1) > 1 then
    return "VM cores have one thread each: submit without --threads-per-core, --ntasks-per-core and --hint", "threads"
  end
  if is_set(job.threads_per_core) and number(job.cores_per_socket, NO_VAL16) == 1 then
    return "--hint=memory_bound is not supported: a VM has as many cores as its job requests"
  end
  return nil
end

-- Whether the job's tasks share CPUs (--overcommit): each node has as many as one task asks for, and with --ntasks-per-node
-- one for each task there, because Slurm uses no node with fewer. No field holds the option,
-- but no other job is submitted with more tasks than CPUs (parse.py tells such jobs in the same way).
local function overcommitted(job)
  local tasks, cpus = number(job.num_tasks, NO_VAL), number(job.min_cpus, NO_VAL)
  return tasks ~= nil and cpus ~= nil and tasks > cpus
end

-- The number of sockets of each node, among which its CPUs are divided evenly, for so many tasks there.
local function sockets_of(job, tasks_here)
  local per_socket = is_set(job.ntasks_per_socket) and job.ntasks_per_socket
  return math.max(number(job.sockets_per_node, NO_VAL16) or 1, per_socket and ceil_div(tasks_here, per_socket) or 1, 1)
end

-- What a job asks for by its comment, in words such as vm:net=1G,per-host=2: each key, how its value is read, and what
-- the value has to be. Another word of the comment is the user's own (requests.py reads the same).
local MIB = { [""] = 1, M = 1, G = 1024, T = 1048576 }
local MBIT = { [""] = 1, M = 1, G = 1000 }
local SECONDS = { S = 1, M = 60, H = 3600, D = 86400 }

local function quantity(text, units)
  local digits, unit = string.match(text, "^(%d+)(%a?)$")
  local value = digits and #digits < 10 and units[string.upper(unit)] and tonumber(digits) * units[string.upper(unit)]
  return value and value > 0 and value or nil
end

local WISHES = {
  ["mem-per-task"] = { units = MIB, form = "a size such as 500M or 2G" },
  ["net"] = { units = MBIT, form = "bits a second such as 100M or 1G" },
  ["per-host"] = { units = { [""] = 1 }, form = "a number of VMs, 1 or more" },
  ["save"] = { units = SECONDS, bare = true, form = "the time before the end, such as 90s, 30m or 2h" },
  ["restart"] = { units = {}, bare = true, form = "it without a value" },
  ["checkpoint"] = { units = SECONDS, form = "the time between two checkpoints, such as 30m or 6h" },
  ["shared-files"] = { units = {}, bare = true, form = "it without a value" },
}

-- What the comment asks for, by key; nil and why if it cannot be understood.
local function wishes(comment)
  local found = {}
  for _, word in ipairs(words(comment, "%s")) do
    for _, wish in ipairs(words(string.match(word, "^vm:(.*)$"), ",")) do
      local key, text = string.match(wish, "^([^=]*)=?(.*)$")
      local known = WISHES[key]
      if not known and inside.is_word(key) then return nil, inside.foreign(string.format("vm:%s in --comment", wish)) end
      if not known then
        local known_ones = "mem-per-task, net, per-host, save, restart, checkpoint or shared-files"
        return nil, string.format("vm:%s in --comment is not supported: use %s", wish, known_ones)
      end
      if found[key] then return nil, string.format("vm:%s is given twice in --comment: give it once", key) end
      found[key] = known.bare and wish == key and 0 or quantity(text, known.units)
      if not found[key] then return nil, string.format("vm:%s in --comment is wrong: give %s", wish, known.form) end
    end
  end
  if found.restart and not found.save then
    return nil, "vm:restart in --comment is for jobs that are saved: give vm:save,restart"
  end
  if found["shared-files"] and not found.checkpoint then
    return nil, "vm:shared-files in --comment is for jobs with checkpoints: give vm:checkpoint=6h,shared-files"
  end
  return found
end

local function wish(job, key)
  return (wishes(job.comment) or {})[key]
end

local partition_now -- as Slurm knows our partition at the moment

-- The memory in MiB of a node with so many CPUs that Slurm gives to a job which requests none: the partition's default comes
-- before that of the cluster.
local function default_memory(cpus)
  local partition = partition_now or {}
  local per_node, per_cpu = number(partition.def_mem_per_node, nil) or 0, number(partition.def_mem_per_cpu, nil) or 0
  if per_node > 0 then return per_node end
  return (per_cpu > 0 and per_cpu or site.memory_per_cpu) * cpus
end

-- The number of the job's nodes, and the CPUs, memory in MiB and disk in MiB of each node. wanted: another number of
-- nodes than the smallest that the job accepts.
local function node_size(job, wanted)
  local tasks = number(job.num_tasks, NO_VAL)
  local tasks_per_node = number(job.ntasks_per_node, NO_VAL16)
  local nodes = wanted or number(job.min_nodes, NO_VAL)
  if not nodes or nodes == 0 then nodes = tasks and tasks_per_node and ceil_div(tasks, tasks_per_node) or 1 end
  local per_task = math.max(number(job.cpus_per_task, NO_VAL16) or 1, 1)
  local tasks_here = math.max(tasks_per_node or 0, ceil_div(tasks or 1, nodes))
  local side_by_side = overcommitted(job) and math.max(tasks_per_node or 1, 1) or tasks_here
  local cpus = math.max(side_by_side * per_task, number(job.pn_min_cpus, NO_VAL16) or 1,
                        number(job.cores_per_socket, NO_VAL16) or 1,
                        ceil_div(number(job.min_cpus, NO_VAL) or 1, nodes))
  local sockets = sockets_of(job, side_by_side)
  if sockets > 1 then
    local tasks_there = math.min(is_set(job.ntasks_per_socket) and job.ntasks_per_socket or side_by_side, side_by_side)
    local least = math.max(number(job.cores_per_socket, NO_VAL16) or 1,
                           is_set(job.ntasks_per_socket) and tasks_there * per_task or 1)
    cpus = math.max(ceil_div(cpus, sockets), least) * sockets
  end
  local memory = number(job.min_mem_per_node, nil)
  if not memory or memory == 0 then
    local per_cpu = number(job.min_mem_per_cpu, nil)
    memory = per_cpu and per_cpu * cpus or default_memory(cpus)
  end
  local per_task_memory = wish(job, "mem-per-task")
  if per_task_memory then memory = per_task_memory * tasks_here end
  return nodes, cpus, memory, number(job.pn_min_tmp_disk, NO_VAL) or 0, sockets
end

-- Whether the job accepts an instant clone of an image. any_image, any_kind: so do jobs that name no image, no kind.
local function accepts(job, image, any_image, any_kind)
  local right_image, kinds = any_image, 0
  for _, word in ipairs(words(job.features, "&,%s")) do
    if word == image then right_image = true
    elseif word == "instant" or word == "auto" then kinds = kinds + 1
    else return false end
  end
  return right_image and (kinds == 1 or kinds == 0 and any_kind)
end

-- Whether a job may skip the gate: the partition is up.
local UP = 3 -- PARTITION_UP (slurm.h)

local function may_skip_gate(partitions)
  local partition = (partitions or {})[site.partition]
  return partition ~= nil and partition.state_up == UP
end

-- The lines of a small file, or of its first bytes; none if it cannot be read.
local function lines_of(path, bytes)
  local file = io.open(path)
  if not file then return {} end
  local text = file:read(bytes or 65536)
  file:close()
  return words(text, "\n")
end

-- Whether the job cannot start at once, whatever nodes are idle.
local function has_to_wait(job)
  return job.priority == 0 or is_set(job.dependency) or is_set(job.array_inx) or is_set(job.licenses)
    or (number(job.begin_time, nil) or 0) > os.time()
end

-- Whether the user's jobs may take no node now, and the end of the name of a node's file after the job has taken it. The
-- user took nodes for which no job came: by --test-only, which Slurm does not tell, or by jobs that Slurm then refused.
local function taker(line, uid)
  local uids = string.match(line or "", "^excluded([ %d]*)$")
  if not uids then return true end
  return string.find(uids .. " ", string.format(" %d ", uid), 1, true) ~= nil, string.format(".%d", uid)
end

-- The tag of an idle node that the job takes, or nil. The controller lists the nodes that it offers. A node is taken by
-- renaming its file, which succeeds once only.
local function take_offered_node(job, partitions)
  local lines = lines_of(site.inbox .. "/spares/list")
  if (tonumber(lines[1]) or 0) < os.time() then return nil end -- no controller would add the job's user to the guest
  local excluded, suffix = taker(lines[2], job.user_id)
  if excluded then return nil end
  local nodes, cpus, memory, disk, sockets = node_size(job)
  if has_to_wait(job) or nodes ~= 1 or sockets > 1 or wish(job, "net") or not may_skip_gate(partitions) then return nil end
  local max_mem_per_cpu = number(partitions[site.partition].max_mem_per_cpu, nil) or 0
  if max_mem_per_cpu > 0 and memory > max_mem_per_cpu * cpus then return nil end -- Slurm would give the job more CPUs
  for row = 2, #lines do
    local node, tag, image, any_image, any_kind, has_cpus, has_memory, has_disk = string.match(lines[row],
      "^(%S+) (%S+) (%S+) ([01]) ([01]) (%d+) (%d+) (%d+)$")
    if node and cpus == tonumber(has_cpus) and memory <= tonumber(has_memory) and disk <= tonumber(has_disk)
      and accepts(job, image, any_image == "1", any_kind == "1")
      and os.rename(site.inbox .. "/spares/open." .. node, site.inbox .. "/spares/taken." .. node .. suffix) then
      return tag
    end
  end
  return nil
end

-- The image and the kind of clone that the job names, each or nil. A job's record has the gate's feature or a tag, too.
local function image_and_kind(job)
  local image, kind
  for _, word in ipairs(words(job.features, "&,%s")) do
    if KINDS[word] then kind = kind or word
    elseif placement(word) then -- it tells nothing of the VMs
    elseif word ~= site.gate_feature and string.sub(word, 1, 3) ~= "mv_" then image = image or word end
  end
  return image, kind
end

-- What hosts can hold of jobs like this one, as the controller published it (submission.py describes the file): limits of
-- which the job has to keep one. There are none if nothing was published, or if no controller has confirmed it for a
-- while: then no job is refused for its size.
local LIMITS_VERSION = "1"

local function published(job)
  local image, kind = image_and_kind(job)
  local lines = lines_of(site.inbox .. ".limits", "*a")
  local found, others, listed = {}, {}, false
  local version, valid_until = string.match(lines[1] or "", "^(%d+) (%d+)$")
  if version ~= LIMITS_VERSION or tonumber(valid_until) < os.time() then return found end
  for row = 2, #lines do
    local name, default, rest = string.match(lines[row], "^(%S+) ([01]) (.+)$")
    local mine = name and (name == image or not image and default == "1")
    listed = listed or mine
    if mine or name == "*" then
      local into = mine and found or others
      local limit, kinds, count, host_cpus, node_cpus, host_disk, least, overhead, net, sizes =
        string.match(rest, "^(%d+) ([%a,]+) (%d+) (%d+)/(%d+) (%d+)/(%d+)/(%d+)/(%d+)([%d ]*)$")
      if limit and string.find("," .. kinds .. ",", "," .. (kind or "default") .. ",", 1, true) then
        local hosts = { count = tonumber(count), cpus = tonumber(host_cpus), disk = tonumber(host_disk),
                        node_cpus = tonumber(node_cpus),
                        least_disk = tonumber(least), disk_overhead = tonumber(overhead), net = tonumber(net),
                        memory = {} }
        for word in string.gmatch(sizes, "%d+") do table.insert(hosts.memory, tonumber(word)) end
        into[limit] = into[limit] or {}
        table.insert(into[limit], hosts)
      end
    end
  end
  return (listed or not image) and found or others
end

local MOST_NODES = 256 -- the lists of memory sizes end there (limits.py)

-- How many nodes of a size hosts can hold together. Each list of memory sizes begins with the largest one. asked: what
-- the job's comment asks for.
local function nodes_held(limit, cpus, memory, disk, asked)
  local total = 0
  for _, hosts in ipairs(limit) do
    local held, above = 0, #hosts.memory + 1
    while above - held > 1 do
      local middle = math.floor((held + above) / 2)
      if hosts.memory[middle] >= memory then held = middle else above = middle end
    end
    held = cpus <= hosts.node_cpus and math.min(held, math.floor(hosts.cpus / cpus)) or 0
    local each = math.max(hosts.least_disk, disk) + hosts.disk_overhead
    if each > 0 then held = math.min(held, math.floor(hosts.disk / each)) end
    if asked.net then held = math.min(held, math.floor(hosts.net / asked.net)) end
    held = math.min(held, asked["per-host"] or held)
    total = total + hosts.count * held
  end
  return total
end

-- The most nodes of a size that any limit lets the job have; nil if there is no limit for the job.
local function most_nodes(limits, cpus, memory, disk, asked)
  local most
  for _, limit in pairs(limits) do most = math.max(most or 0, nodes_held(limit, cpus, memory, disk, asked)) end
  return most
end

-- The largest single nodes of all limits, none of which contains another; the largest ones by memory come first.
local function largest_nodes(limits)
  local all, largest = {}, {}
  for _, limit in pairs(limits) do
    for _, hosts in ipairs(limit) do
      if hosts.memory[1] then
        local disk = math.max(0, hosts.disk - hosts.disk_overhead)
        table.insert(all, { cpus = hosts.node_cpus, memory = hosts.memory[1], disk = disk })
      end
    end
  end
  table.sort(all, function(a, b)
    if a.memory ~= b.memory then return a.memory > b.memory end
    if a.cpus ~= b.cpus then return a.cpus > b.cpus end
    return a.disk > b.disk
  end)
  for _, size in ipairs(all) do
    local contained = false
    for _, other in ipairs(largest) do
      contained = contained or size.cpus <= other.cpus and size.disk <= other.disk
    end
    if not contained then table.insert(largest, size) end
  end
  return largest
end

local function describe(cpus, memory, disk)
  local text = string.format("%d CPU%s and %d MiB of memory", cpus, cpus == 1 and "" or "s", memory)
  if disk == 0 then return text end
  return string.format("%s with %d MiB of disk", text, disk)
end

-- Why not even one node of the job fits on any host, with the largest sizes that are possible. mincpus: what the job
-- asks for with --mincpus, of which Slurm passes 16 bits on.
local function node_too_large(sizes, cpus, memory, disk, mincpus)
  local descriptions, note = {}, mincpus == cpus and " (Slurm takes --mincpus modulo 65536)" or ""
  for row, size in ipairs(sizes) do
    if cpus <= size.cpus then note = "" end
    if row <= 3 then descriptions[row] = describe(size.cpus, size.memory, disk > 0 and size.disk or 0) end
  end
  if #sizes == 0 then return "no host here could hold a VM for this job: ask an administrator for larger hosts" end
  return string.format("the job requests %s on one node%s, but the largest VM for a job here has %s: request less per"
    .. " node, or spread the job over more nodes with -N",
    describe(cpus, memory, disk), note, table.concat(descriptions, ", or "))
end

-- Why no host has the bandwidth that one VM of the job asks for, or nil.
local function too_fast(limits, net)
  local most
  for _, limit in pairs(limits) do
    for _, hosts in ipairs(limit) do most = math.max(most or 0, hosts.net) end
  end
  if not net or not most or net <= most then return nil end
  if most == 0 then return "no host here has bandwidth to claim: submit without vm:net in --comment" end
  return string.format("the job requests %d Mbit/s with vm:net, but a host here has %d Mbit/s at most: request less", net,
    most)
end

-- Why the job is too large for all hosts together, or nil. wanted: the number of nodes, if it is not the smallest.
local function too_large(job, limits, wanted)
  local nodes, cpus, memory, disk, sockets = node_size(job, wanted)
  if sockets > site.max_sockets then
    return string.format("the job requests %d sockets on a node, but a VM has %d at most: request fewer", sockets,
      site.max_sockets)
  end
  if nodes > site.max_nodes then -- Slurm checks this for submissions, but not for updates
    return string.format("the job requests %d nodes, but a job can have %d: request fewer nodes", nodes, site.max_nodes)
  end
  if disk > site.max_disk then
    return string.format("the job requests %d MiB of disk with --tmp, but a VM has %d MiB: use a shared file system",
      disk, site.max_disk)
  end
  local asked = wishes(job.comment) or {}
  local most = most_nodes(limits, cpus, memory, disk, asked)
  if not most or most >= nodes or nodes > MOST_NODES then return nil end
  local message = too_fast(limits, asked.net)
  if message then return message end
  if most == 0 then return node_too_large(largest_nodes(limits), cpus, memory, disk, job.pn_min_cpus) end
  local each = asked.net and string.format(" and %d Mbit/s", asked.net) or ""
  local rule = asked["per-host"] and string.format(", at most %d on a host", asked["per-host"]) or ""
  return string.format("the job requests %d nodes with %s%s each%s, but all hosts together can hold %d of them at the"
    .. " same time: request fewer nodes, or less per node", nodes, describe(cpus, memory, disk), each, rule, most)
end

-- The number of nodes of a new job, or nil and why the job is too large. Of a range (-N2-4) it is the smallest number
-- that the hosts could hold.
local function choose_node_count(job)
  local limits, least = published(job), node_size(job)
  local most, message = least, nil
  if number(job.min_nodes, NO_VAL) then most = math.max(least, number(job.max_nodes, NO_VAL) or least) end
  for nodes = least, math.min(most, math.max(least, site.max_nodes)) do
    local reason = too_large(job, limits, nodes)
    if not reason then return nodes end
    message = message or reason
  end
  return nil, message
end

-- Why the memory that the job asks for is not that of its tasks, or nil.
local function contradicting_memory(job, nodes)
  local _, cpus, memory = node_size(job, nodes)
  local each = wish(job, "mem-per-task")
  local per_node, per_cpu = number(job.min_mem_per_node, nil), number(job.min_mem_per_cpu, nil)
  if not each or (per_node or per_cpu and per_cpu * cpus or memory) == memory then return nil end
  return string.format("vm:mem-per-task in --comment gives each node %d MiB, but %s gives it %d: submit with one of"
    .. " them", memory, per_node and "--mem" or "--mem-per-cpu", per_node or per_cpu * cpus)
end

-- Fix the number of the job's VMs: Slurm only estimates it for a waiting job, and the estimate changes.
local function set_node_count(job, nodes)
  local _, cpus, memory, _, sockets = node_size(job, nodes)
  job.min_nodes, job.max_nodes = nodes, nodes
  if wish(job, "mem-per-task") then job.min_mem_per_node = memory end -- Slurm counts and limits what the node has
  if is_set(job.cores_per_socket) or sockets > 1 then job.pn_min_cpus = cpus end
end

local function refuse(message, code)
  slurm.log_user("%s", message)
  return ERROR[code or "unsupported"]
end

-- The first reason that one of these functions gives for a job, with its error or that of its row; nil if there is none.
local function first_reason(checks, ...)
  for _, check in ipairs(checks) do
    local message, code = check[1](...)
    if message then return message, code or check[2] end
  end
  return nil
end

-- Tell the controller to observe the jobs of a user, or a job, soon, by an empty file. Each user has one name, and so has
-- each job, so the files do not pile up.
local function leave(name)
  local file = io.open(site.inbox .. "/" .. name, "w")
  if file then file:close() end
end

local function hint(uid) leave(string.format("submit.%d", uid)) end

-- The same after an update of what squeue does not show: how many tasks of an array may run at once, and whether the
-- memory is that of a node or of a CPU (details.py).
local function hint_of_details(job, record)
  if not (job.array_inx or job.min_mem_per_node or job.min_mem_per_cpu) then return end
  local id = number(record.array_job_id, NO_VAL) or 0
  leave(string.format("change.%d", id > 0 and id or record.job_id))
end

-- Why the licences that the job asks for are not supported, or nil.
local function unsupported_licences(job)
  local licences = job.licenses or ""
  if string.find(licences, "|", 1, true) then
    return "alternatives in --licenses are not supported: join licences with commas"
  end
  for _, word in ipairs(words(licences, ",;")) do
    if string.match(word, "^[^:=]+") == site.licence then
      return "the licence " .. site.licence .. " is reserved for Multiverse: submit without it"
    end
  end
  return nil
end

-- Why no job can wait at the gate, or nil. Only the name is looked for: the rest of a reservation that was deleted a
-- moment ago is memory that slurmctld has freed.
local function gate_is_open()
  if (slurm.reservations or {})[site.gate_feature] then return nil end
  return "no job can wait in partition " .. site.partition .. " now: try again in a minute, or ask an administrator"
    .. " to start Multiverse's daemon"
end

local function joined(text, separator, word)
  return text and text ~= "" and text .. separator .. word or word
end

-- What a job's script and environment say of an option of sbatch, or nil. What is on the command line of sbatch shows
-- nowhere here.
local function given(job, option, variable)
  local value = (job.environment or {})[variable]
  for line in string.gmatch(job.script or "", "[^\n]+") do
    local found = string.match(line, "^#SBATCH%s.*%-%-" .. option:gsub("%p", "%%%0") .. "[=%s]%s*[\"']?([^%s\"']+)")
    value = value or found
    if not string.find(line, "^%s*#") and string.find(line, "%S") then break end
  end
  return value
end

-- How many seconds before the end Slurm sends a signal that the job has asked for (--signal), at the earliest: slurmctld
-- looks every 30 s. 0: it sends none.
local function warned_before(job)
  local signal = given(job, "signal", "SBATCH_SIGNAL")
  if not signal then return 0 end
  return (tonumber(string.match(signal, "@(%d+)")) or 60) + 30
end

local FREEZING = 30 -- seconds in which a job is stopped at the latest, if all goes well

-- The time limit of a job in seconds, or nil if it has none.
local function time_limit(job)
  local partition = partition_now or {}
  local most = number(partition.max_time, NO_VAL)
  local asked = number(job.time_limit, NO_VAL)
  if not asked and job.time_limit ~= INFINITE then asked = number(partition.default_time, NO_VAL) end
  local minutes = asked and most and math.min(asked, most) or asked or most
  return minutes and minutes * 60
end

-- Why no state of a job can be written that asks for it by that key, or nil.
local function unsupported_state(job, key)
  if not site.save then return string.format("jobs are not saved at this site: submit without vm:%s in --comment", key) end
  if not job.script then return string.format("jobs of srun and salloc cannot be saved (vm:%s): submit with sbatch", key) end
  if job.requeue == 0 and not (key == "save" and site.save_no_requeue) then
    return string.format("a job that is saved is queued again (vm:%s): submit without --no-requeue", key)
  end
  if string.sub(given(job, "open-mode", "SBATCH_OPEN_MODE") or given(job, "open-mode", "SLURM_OPEN_MODE") or "", 1, 1) == "t" then
    return string.format("a job that is saved appends to its output (vm:%s): submit without --open-mode=truncate", key)
  end
  return nil
end

-- Why there can be no checkpoints of a job that asks for them, or nil.
local function unsupported_checkpoint(job)
  return wish(job, "checkpoint") and unsupported_state(job, "checkpoint")
end

-- Why a job that asks to be saved at its time limit cannot be, or nil.
local function unsupported_save(job)
  local before = wish(job, "save")
  if not before then return nil end
  local message = unsupported_state(job, "save")
  if message then return message end
  local limit = time_limit(job)
  local warned = warned_before(job)
  if limit and 2 * math.max(before, warned > 0 and warned + FREEZING or 0) > limit then
    return "vm:save would save the job before half of its time is over: give a longer --time, or save it later"
  end
  return nil
end

-- Write into the comment that the job is saved earlier, if a signal that it asked for would come before that.
local function save_before_signal(job)
  local before, warned = wish(job, "save"), warned_before(job)
  if not before or warned == 0 or (before == 0 and site.save_before or before) >= warned + FREEZING then return end
  job.comment = string.gsub(" " .. job.comment, "%svm:[^%s]*", function(word)
    return (string.gsub(word .. ",", "([:,])save[^,]*,", "%1save=" .. warned + FREEZING .. "s,")):sub(1, -2)
  end):sub(2)
end

local function unknown_wish(job)
  local _, message = wishes(job.comment)
  return message
end

-- Why there can be no checkpoints of a job that runs in so many VMs and asks for them, or nil.
local function several_saved(job, nodes)
  if nodes == 1 or not wish(job, "checkpoint") then return nil end
  return string.format("jobs of several VMs have no checkpoints (vm:checkpoint), and this one would have %d: submit with --nodes=1", nodes)
end

-- What keeps a submission from being supported, in this order, with Slurm's errors.
local SUBMISSION_CHECKS = {
  { inside.unsupported },
  { unknown_wish },
  { unsupported_option },
  { unsupported_variable },
  { ambiguous_features, "feature" },
  { unsupported_topology },
  { unsupported_licences, "licence" },
  { unsupported_save },
  { unsupported_checkpoint },
  { gate_is_open, "closed" },
}

local function submit(job, partition, partitions)
  if #words(partition, ",") > 1 then
    return refuse("several partitions are not supported: submit to " .. site.partition .. " only", "partition")
  end
  if job.user_id == 0 then
    return refuse("Multiverse runs no jobs of root: submit as a user, e.g. sbatch --uid=NAME", "user")
  end
  if number(job.het_job_offset, NO_VAL) then
    return refuse("heterogeneous jobs are not supported: submit each component as a separate job")
  end
  drop_what_holds_anyway(job)
  local message, code = first_reason(SUBMISSION_CHECKS, job)
  if message then return refuse(message, code) end
  local nodes, too_many = choose_node_count(job)
  if too_many then return refuse(too_many, "size") end
  message = several_saved(job, nodes)
  if message then return refuse(message) end
  message = contradicting_memory(job, nodes)
  if message then return refuse(message, "memory") end
  set_node_count(job, nodes)
  save_before_signal(job)
  if (wish(job, "save") or wish(job, "checkpoint")) and job.requeue ~= 0 then job.requeue = 1 end -- also where JobRequeue=0 is the default
  local tag = take_offered_node(job, partitions)
  if job.immediate == 1 and not tag then
    return refuse("no VM is ready for this job: give the seconds in which there may be one, as in --immediate=60", "immediate")
  end
  job.features = joined(job.features, "&", tag or site.gate_feature)
  if tag then -- before the jobs that wait: Slurm looks at the first ones only
    job.nice = (number(job.nice, NO_VAL) or NICE_OFFSET) - site.boost
  else
    job.licenses = joined(job.licenses, ",", site.licence .. ":1")
  end
  hint(job.user_id)
  return slurm.SUCCESS
end

-- Whether an update changes the size of the job's nodes.
local SIZE_FIELDS = { "min_nodes", "min_cpus", "pn_min_cpus", "min_mem_per_node", "min_mem_per_cpu", "num_tasks",
                      "cpus_per_task", "ntasks_per_node", "cores_per_socket", "pn_min_tmp_disk" }

local function changes_size(job)
  for _, field in ipairs(SIZE_FIELDS) do
    if is_set(job[field]) then return true end
  end
  return false
end

-- The job's size after an update. A job's record has fewer fields than a submission.
local function updated(job, record)
  local memory = (job.min_mem_per_node or job.min_mem_per_cpu) and job or record
  return {
    features = record.features,
    comment = record.comment,
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

-- What a comment asks for, as a text that is the same for the same.
local function wishes_as_text(comment)
  local found, sorted = wishes(comment), {}
  for key, value in pairs(found or { wrong = comment }) do sorted[#sorted + 1] = key .. "=" .. value end
  table.sort(sorted)
  return table.concat(sorted, ",")
end

-- Why an update of what the job asks for by its comment, or of what follows from that, is not supported; or nil.
local function unsupported_change(job, record)
  if job.comment and wishes_as_text(job.comment) ~= wishes_as_text(record.comment) then
    return "what vm: in the comment of a submitted job asks for cannot be changed: cancel the job and submit it again"
  end
  if changes_size(job) and wish(record, "mem-per-task") then
    return "the memory of this job is that of its tasks (vm:mem-per-task): cancel the job and submit it again"
  end
  return nil
end

-- What keeps an update from being supported.
local UPDATE_CHECKS = {
  { unsupported_change },
  { unsupported_option },
  { unsupported_topology },
  { unsupported_licences, "licence" },
}

local function modify(job, record)
  local wanted = job.partition or ""
  if not ours(record.partition) then
    return refuse("submit the job to partition " .. site.partition .. " instead", "partition")
  end
  if wanted ~= "" and wanted ~= record.partition then
    return refuse("only Multiverse changes the partition of this job: cancel the job and submit it again")
  end
  if job.features or job.req_nodes then
    return refuse("the constraint and nodes of a submitted job cannot be changed: cancel the job and submit it again")
  end
  drop_what_holds_anyway(job)
  local message, code = first_reason(UPDATE_CHECKS, job, record)
  if message then return refuse(message, code) end
  local nodes = number(job.min_nodes, NO_VAL)
  local waits = record.job_state % 256 == PENDING
  if not waits then nodes = nil end -- Slurm lets a running job give nodes up, and refuses more nodes
  message = nodes and several_saved(record, nodes)
  if message then return refuse(message) end
  if waits and changes_size(job) then
    local whole = updated(job, record)
    message = too_large(whole, published(whole))
    if message then return refuse(message, "size") end
  end
  if nodes then job.max_nodes = nodes end
  if job.licenses and has_word(record.licenses, ",;", site.licence .. ":1") then -- it waits at the gate
    job.licenses = joined(job.licenses, ",", site.licence .. ":1")
  end
  hint(record.user_id)
  return slurm.SUCCESS
end

-- After an error the job is refused: Slurm would accept unsupported options and ignore them.
local function guarded(what, ...)
  local fine, answer = pcall(what, ...)
  if fine then return answer end
  slurm.log_error("multiverse: %s", tostring(answer))
  return refuse("{{ failed }}", "internal")
end

-- Jobs of other partitions with VMs inside.
local function submit_inside(job)
  local message = inside.submit(job)
  return message and refuse(message) or slurm.SUCCESS
end

local function modify_inside(job, record)
  local message = inside.modify(job, record)
  return message and refuse(message) or slurm.SUCCESS
end

-- Other jobs of other partitions are accepted before any code runs that could fail.
function multiverse.submit(job, partitions, uid)
  local partition = job.partition or default_partition(partitions)
  partition_now = (partitions or {})[site.partition]
  if any_ours(partition) then return guarded(submit, job, partition, partitions) end
  if inside.asked(job) then return guarded(submit_inside, job) end
  return slurm.SUCCESS
end

function multiverse.modify(job, record, partitions, uid)
  partition_now = (partitions or {})[site.partition]
  if ours(record.partition) then pcall(hint_of_details, job, record) end
  if site.administrators[uid] then return slurm.SUCCESS end
  if ours(record.partition) or any_ours(job.partition) then return guarded(modify, job, record) end
  if job.comment or job.features then return guarded(modify_inside, job, record) end
  return slurm.SUCCESS
end

return multiverse

-- Jobs with VMs inside their allocations, on nodes that Slurm schedules itself. Their users ask for these by options of
-- Slurm's plugin (spank/multiverse.c), or by words of the comment such as vm:image=slim,vcpu=2, which the plugin's prolog
-- reads as this file does. Such a job gets a feature that a node has only after its agent has tested the plugin there, so
-- its tasks never run on a node without the plugin.

local inside = {}
local site = dofile("{{ directory }}/multiverse_site.lua")
local feature = site.job_feature

local PREFIX = "_SLURM_SPANK_OPTION_multiverse_" -- how Slurm names the options of the plugin in spank_job_env
local MIB = { [""] = 1, k = 1 / 1024, m = 1, g = 1024, t = 1048576 }
local MOST_CPUS, MOST_VMS, MOST_FUNCTIONS, MOST_REGIONS = 4096, 64, 4, 32
local LONGEST_IMAGE, MOST_MIB = 64, 2 ^ 32

local function is_image(text)
  return #text <= LONGEST_IMAGE and string.find(text, "^[%w_][%w._-]*$") ~= nil
end

local function is_count(most)
  return function(text) return string.find(text, "^%d+$") ~= nil and tonumber(text) >= 1 and tonumber(text) <= most end
end

local function is_size(text)
  local digits, unit = string.match(text, "^(%d+)(%a?)$")
  local times = digits and MIB[string.lower(unit)]
  if not times or tonumber(digits) > 2 ^ 40 then return false end
  local size = math.ceil(tonumber(digits) * times)
  return size >= 1 and size <= MOST_MIB
end

-- Nothing is one: --sriov has a value that may be left out.
local function is_functions(text) return text == "" or is_count(MOST_FUNCTIONS)(text) end

local SIZE = "a size in MiB, or with K, M, G or T after it"
local WORDS = {
  image = { option = "vm_image", is = is_image, form = "the name of an image" },
  vcpu = { option = "vcpu_per_vm", is = is_count(MOST_CPUS), form = "a number of virtual CPUs, at least 1" },
  ["per-node"] = { option = "vm_per_node", is = is_count(MOST_VMS), form = "a number of VMs, from 1 to 64" },
  sriov = { option = "sriov", is = is_functions, form = "a number of virtual functions, from 1 to 4" },
  ivshmem = { option = "ivshmem", is = is_count(MOST_REGIONS), form = "a number of regions of shared memory, from 1 to 32" },
  memory = { option = "memory_per_vm", is = is_size, form = SIZE },
  disk = { option = "disk_size", is = is_size, form = SIZE },
}

-- Each part of the words of a comment that begin with vm: (multiverse.lua and requests.py divide a comment alike).
local function parts(comment)
  local found = {}
  for word in string.gmatch(type(comment) == "string" and comment or "", "%S+") do
    for part in string.gmatch(string.match(word, "^vm:(.*)$") or "", "[^,]+") do found[#found + 1] = part end
  end
  return found
end

-- The plugin's options of a job, by the names of their variables. A release of Slurm that shows none has no such field.
local function options(job)
  local found, any = {}, false
  for _, entry in pairs(type(job.spank_job_env) == "table" and job.spank_job_env or {}) do
    local name, value = string.match(entry, "^([^=]*)=(.*)$")
    if name and string.sub(name, 1, #PREFIX) == PREFIX then found[name], any = value, true end
  end
  return found, any
end

-- What a comment asks for, as variables of options; nil and why if it cannot be understood.
local function read(comment)
  local found = {}
  for _, part in ipairs(parts(comment)) do
    local key, text = string.match(part, "^([^=]*)=?(.*)$")
    local known = WORDS[key]
    if not known then
      return nil, string.format("vm:%s in --comment is not supported for VMs inside a job: use image, per-node, vcpu,"
        .. " memory, disk, sriov or ivshmem, or submit to partition %s", part, site.partition)
    end
    if found[PREFIX .. known.option] then return nil, string.format("vm:%s is given twice in --comment: give it once", key) end
    if not known.is(text) then return nil, string.format("vm:%s in --comment is wrong: give %s", part, known.form) end
    found[PREFIX .. known.option] = text
  end
  return found
end

-- A constraint with our feature; nil and why if there is none. Counts apply to the features before them only: with
-- rack*2&ours Slurm takes nodes without ours, too.
local function with_feature(features)
  if not features or features == "" or features == feature then return feature end
  if string.find(features, "[%*%[%]]") then
    return nil, "counts and brackets in --constraint are not supported for VMs inside a job: join features with & and |"
  end
  if not string.find(features, "|", 1, true) then return features .. "&" .. feature end
  if not string.find(features, "[%(%)]") then return "(" .. features .. ")&" .. feature end
  if string.find((string.gsub(features, "%b()", "")), "|", 1, true) then
    return nil, "parentheses beside | in --constraint are not supported for VMs inside a job: write (a|b)&c"
  end
  return features .. "&" .. feature
end

-- Why the functions of a job's VMs cannot be requested of Slurm, or nil. They are, where the site has told Slurm of them:
-- `wanted` has the job's options.
local function request_functions(job, wanted)
  local name, functions = site.sriov_gres or "", wanted[PREFIX .. "sriov"]
  if name == "" or not functions then return nil end
  local given = job.gres or "" -- what --gres and --gpus-per-node have asked for, as gres:NAME:COUNT or gres/NAME:COUNT
  if string.find("," .. given .. ",", "[,:/]" .. name:gsub("%p", "%%%0") .. "[,:=]") then
    return string.format("--sriov requests %s of Slurm for all VMs of the job: leave it out of --gres", name)
  end
  local count = (tonumber(functions) or 1) * (tonumber(wanted[PREFIX .. "vm_per_node"]) or 1)
  job.gres = string.format("%s%s%s:%d", given, given == "" and "" or ",", name, count)
  return nil
end

-- Whether a constraint has our feature, as with_feature adds it.
local function has_feature(features)
  return ("&" .. (features or "")):sub(-#feature - 1) == "&" .. feature
end

-- Whether a job of another partition asks for a VM inside.
function inside.asked(job)
  local _, any = options(job)
  return any or #parts(job.comment) > 0
end

-- Whether a comment asks by this word for a VM inside a job.
function inside.is_word(key) return WORDS[key] ~= nil end

-- Why a job of Multiverse's partitions cannot have what is for VMs inside jobs.
function inside.foreign(what)
  return string.format("%s is for VMs inside jobs of other partitions: in partition %s each node is a VM, so select an"
    .. " image with --constraint, and its size with --cpus-per-task, --mem and --tmp", what, site.partition)
end

-- Why a job of Multiverse's partitions cannot have the options of the plugin, or nil.
function inside.unsupported(job)
  local _, any = options(job)
  return any and inside.foreign("--vm-image or another option of the plugin") or nil
end

-- Give a job that asks for a VM inside the constraint that it needs; why it cannot have one, or nil.
function inside.submit(job)
  local given, any = options(job)
  local wanted, message = read(job.comment)
  if message then return message end
  if any and next(wanted) then
    return "the VM inside this job is described by options and by vm: in --comment: use one of them"
  end
  local features
  features, message = with_feature(job.features)
  if message then return message end
  message = request_functions(job, any and given or wanted)
  if message then return message end
  job.features = features
  -- Steps learn from the job's record on the node. If that cannot be written, a batch script is to see by its environment
  -- that it must not run without a VM: sbatch --export=NONE hands no options on.
  if job.script and job.environment then
    for name, value in pairs(any and given or wanted) do job.environment[name] = value end
  end
  -- Where the plugin is not loaded at submission, nobody else can tell why Slurm may refuse the constraint.
  if not any and site.job_design == "tasks" then
    slurm.log_user("this job runs on a node with the feature %s, where its batch file has to call multiverse-vm", feature)
  elseif not any then
    slurm.log_user("the tasks of this job run in a VM, on a node with the feature %s", feature)
  end
  return nil
end

-- Why an update is not supported, or nil. One that changes the constraint leaves our feature in it.
function inside.modify(job, record)
  local before = parts(record.comment)
  if job.comment and table.concat(parts(job.comment), ",") ~= table.concat(before, ",") then
    return "what vm: in the comment of a submitted job asks for cannot be changed: cancel the job and submit it again"
  end
  if job.features and has_feature(record.features) then
    local features, message = with_feature(job.features)
    if message then return message end
    job.features = features
  end
  return nil
end

return inside

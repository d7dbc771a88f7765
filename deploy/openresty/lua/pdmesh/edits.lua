-- What each kind of rule does to a body, recorded as actions.
-- gateway/rules/edits.py is this file in Python: same edits, same order.

local document = require("pdmesh.document")

local byte = string.byte

local Edits = {}
Edits.__index = Edits

-- One body under edit. It is opened when the first rule wants to change something.
function Edits.new(body, aliases)
    return setmetatable({ body = body, aliases = aliases, forced = {}, actions = {} }, Edits)
end

function Edits:render()
    if not self.document or #self.actions == 0 then
        return self.body
    end
    return document.render_body(self.document)
end

function Edits:root()
    if not self.document then
        self.document = document.open_body(self.body)
    end
    return self.document.root
end

function Edits:record(kind, path, rule)
    self.actions[#self.actions + 1] = { kind = kind, path = path, rule = rule.name }
end

-- The object that holds the last key of the target, or nil.
function Edits:node(target)
    local node = self:root()
    for i = 1, #target.keys - 1 do
        local member = node and node:get(target.keys[i])
        node = member and document.open(member)
    end
    return node
end

-- The members that mean the target's last key.
function Edits:spellings(node, target)
    local members = {}
    local key = target.keys[#target.keys]
    local names = #target.keys == 1 and self.aliases[key] or { key }
    for _, name in ipairs(names) do
        members[#members + 1] = node and node:get(name)
    end
    return members
end

-- The target as this client spells it.
local function path_of(target, key)
    return key == target.keys[#target.keys] and target.text or key
end

function Edits:rewrite_model(rule, rewrite)
    local member = self:root():get("model")
    if member then
        document.set_value(member, rewrite.text)
        self:record("rewrite_model", rewrite.name, rule)
    end
end

-- Leaves both keys alone when the new one is taken.
function Edits:rename(rule, rename)
    local node = self:node(rename.target)
    local member = node and node:get(rename.target.keys[#rename.target.keys])
    if member and not node:get(rename.new_key) then
        node:rename(member, rename.new_key, rename.new_key_text)
        self:record("rename", rename.target.text .. "->" .. rename.new_key, rule)
    end
end

function Edits:drop(rule, target)
    local node = self:node(target)
    local member = node and node:get(target.keys[#target.keys])
    if member then
        node:remove(member)
        self:record("drop", target.text, rule)
    end
end

function Edits:fill(rule, node, fill, prefix)
    local path = prefix .. fill.key
    if not node.claimed[fill.key] then
        node:insert(fill.key, fill.key_text, fill.value)
        self:record("default", path, rule)
        return
    end
    local member = node:get(fill.key)
    local child = member and #fill.members > 0 and document.open(member)
    -- An empty object is an answer too.
    if child and child:is_claimed() then
        for _, inner in ipairs(fill.members) do
            self:fill(rule, child, inner, path .. ".")
        end
    end
end

-- Fill what the client left out, and nothing else.
function Edits:default(rule, fills)
    local root = self:root()
    for _, fill in ipairs(fills) do
        local is_taken = false
        for _, name in ipairs(self.aliases[fill.key] or {}) do
            is_taken = is_taken or root.claimed[name]
        end
        if not is_taken then
            self:fill(rule, root, fill, "")
        end
    end
end

-- Bound a number, in every spelling of the key that is there.
function Edits:clamp(rule, clamp)
    for _, member in ipairs(self:spellings(self:node(clamp.target), clamp.target)) do
        local value = document.value_of(member)
        local first = byte(value)
        if first == 45 or (first >= 48 and first <= 57) then
            local number, text = tonumber(value), nil
            if clamp.min and number < clamp.min then
                text = clamp.min_text
            elseif clamp.max and number > clamp.max then
                text = clamp.max_text
            end
            if text then
                document.set_value(member, text)
                self:record("clamp", path_of(clamp.target, member.key), rule)
            end
        end
    end
end

function Edits:overlaps_forced(keys)
    for _, earlier in ipairs(self.forced) do
        local length = math.min(#keys, #earlier)
        local is_prefix = true
        for i = 1, length do
            is_prefix = is_prefix and keys[i] == earlier[i]
        end
        if is_prefix then
            return true
        end
        if length == 1 then
            for _, name in ipairs(self.aliases[keys[1]] or {}) do
                if name == earlier[1] then
                    return true
                end
            end
        end
    end
    return false
end

-- Set a value. Of overlapping paths the first one counts.
function Edits:force(rule, force)
    local keys, texts = force.target.keys, force.key_texts
    if self:overlaps_forced(keys) then
        return
    end
    self.forced[#self.forced + 1] = keys
    local node = self:root()
    for i = 1, #keys - 1 do
        local member = node:get(keys[i]) or node:insert(keys[i], texts[i], "{}")
        if not document.open(member) then
            document.set_value(member, "{}")
        end
        node = document.open(member)
    end
    local members = self:spellings(node, force.target)
    if #members == 0 then
        node:insert(keys[#keys], texts[#texts], force.value)
        self:record("force", force.target.text, rule)
    end
    for _, member in ipairs(members) do
        if document.value_of(member) ~= force.value then
            document.set_value(member, force.value)
            self:record("force", path_of(force.target, member.key), rule)
        end
    end
end

return Edits

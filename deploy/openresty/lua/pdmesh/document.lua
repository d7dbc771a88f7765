-- A JSON object open for editing: what is not edited keeps its bytes.
-- gateway/rules/document.py is this file in Python: same edits, same bytes.

local scanner = require("pdmesh.scanner")

local byte, sub, concat = string.byte, string.sub, table.concat
local skip_space = scanner.skip_space
local CLOSE_BRACE, OPEN_BRACE = 125, 123

local ObjectNode = {}
ObjectNode.__index = ObjectNode

-- The members of the object whose text is `text`. A key stays claimed after its member was
-- dropped or renamed: the client did decide it.
local function open_object(text)
    local node = setmetatable({ members = {}, claimed = {} }, ObjectNode)
    local at = skip_space(text, 2)
    -- White space of an object without members.
    node.blank = sub(text, 2, at - 1)
    if byte(text, at) == CLOSE_BRACE then
        return node
    end
    at = 1
    repeat
        at = node:read(text, at + 1)
    until byte(text, at) == CLOSE_BRACE
    return node
end

-- Take the member at `at`; returns the position of the comma or brace behind it.
function ObjectNode:read(text, at)
    local key_at = skip_space(text, at)
    local key_end = scanner.skip_string(text, key_at)
    local value_at = skip_space(text, skip_space(text, key_end) + 1)
    local value_end = scanner.skip_value(text, value_at)
    local next_at = skip_space(text, value_end)
    local key_text = sub(text, key_at, key_end - 1)
    local member = {
        key = scanner.decode_string(key_text),
        key_text = key_text,
        lead = sub(text, at, key_at - 1),
        colon = sub(text, key_end, value_at - 1),
        value = sub(text, value_at, value_end - 1),
        trail = sub(text, value_end, next_at - 1),
    }
    self.members[#self.members + 1] = member
    self.claimed[member.key] = true
    return next_at
end

-- The member of that name, however its key is spelled.
function ObjectNode:get(key)
    if self.claimed[key] then
        for _, member in ipairs(self.members) do
            if member.key == key then
                return member
            end
        end
    end
    return nil
end

function ObjectNode:is_claimed()
    return next(self.claimed) ~= nil
end

-- Add a member behind the last value.
function ObjectNode:insert(key, key_text, value)
    local lead, trail = self.blank, ""
    local last = self.members[#self.members]
    if last then
        lead, trail = "", last.trail
        last.trail = ""
    end
    local member = {
        key = key, key_text = key_text, lead = lead, colon = ":", value = value, trail = trail,
    }
    self.members[#self.members + 1] = member
    self.claimed[key] = true
    return member
end

function ObjectNode:remove(member)
    for position, one in ipairs(self.members) do
        if one == member then
            table.remove(self.members, position)
            break
        end
    end
    if #self.members == 0 then
        self.blank = ""
    end
end

function ObjectNode:rename(member, key, key_text)
    member.key = key
    member.key_text = key_text
    self.claimed[key] = true
end

local M = {}

function M.value_of(member)
    return member.child and member.child:render() or member.value
end

function M.set_value(member, text)
    member.value = text
    member.child = nil
end

-- The value for editing, when it is an object.
function M.open(member)
    if not member.child and byte(member.value) == OPEN_BRACE then
        member.child = open_object(member.value)
    end
    return member.child
end

function ObjectNode:render()
    if #self.members == 0 then
        return "{" .. self.blank .. "}"
    end
    local parts = {}
    for position, member in ipairs(self.members) do
        parts[#parts + 1] = position == 1 and "{" or ","
        parts[#parts + 1] = member.lead
        parts[#parts + 1] = member.key_text
        parts[#parts + 1] = member.colon
        parts[#parts + 1] = M.value_of(member)
        parts[#parts + 1] = member.trail
    end
    parts[#parts + 1] = "}"
    return concat(parts)
end

-- A whole body: one object with white space around it. The body must be valid.
function M.open_body(body)
    local begin = skip_space(body, 1)
    local behind = scanner.skip_value(body, begin)
    return {
        lead = sub(body, 1, begin - 1),
        trail = sub(body, behind),
        root = open_object(sub(body, begin, behind - 1)),
    }
end

function M.render_body(document)
    return document.lead .. document.root:render() .. document.trail
end

return M

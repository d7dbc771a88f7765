-- Which request headers travel on. gateway/rules/headers.py is this file in Python; the lists of
-- names come from there, with the compiled rules.

local conditions = require("pdmesh.conditions")

local M = {}

local function set_of(names)
    local set = {}
    for _, name in ipairs(names) do
        set[name] = true
    end
    return set
end

-- What `decide` needs, from a compiled rules table.
function M.prepare(rules)
    local lists = rules.headers
    return {
        forwarded = set_of(lists.forwarded),
        never = set_of(lists.never),
        never_prefixes = lists.never_prefixes,
        credentials = set_of(lists.credentials),
        allowed = rules.forward_headers,
    }
end

-- All values of each header, by lower-case name.
function M.index(raw)
    local found = {}
    for name, value in pairs(raw) do
        name = name:lower()
        if not name:find("_", 1, true) then
            found[name] = type(value) == "table" and value or { tostring(value) }
        end
    end
    return found
end

local function named_by_connection(headers)
    local listed = {}
    for _, value in ipairs(headers.connection or {}) do
        for option in value:gmatch("[^,]+") do
            listed[option:match("^%s*(.-)%s*$"):lower()] = true
        end
    end
    return listed
end

local function passes(lists, name, listed)
    if listed[name] or lists.never[name] then
        return false
    end
    for _, prefix in ipairs(lists.never_prefixes) do
        if name:sub(1, #prefix) == prefix then
            return false
        end
    end
    if lists.forwarded[name] then
        return true
    end
    for _, glob in ipairs(lists.allowed) do
        if lists.credentials[name] then
            if #glob.parts == 1 and glob.parts[1] == name then
                return true
            end
        elseif conditions.glob_matches(glob, name) then
            return true
        end
    end
    return false
end

-- Returns the names to strip, the headers to set, and records actions through `record`.
-- The first matching rule in file order that names a header decides about it.
function M.decide(lists, headers, matched, record)
    local listed = named_by_connection(headers)
    local strip, decided, set = {}, {}, {}
    local present = {}
    for name in pairs(headers) do
        present[name] = passes(lists, name, listed)
        if not present[name] then
            strip[#strip + 1] = name
        end
    end
    for _, rule in ipairs(matched) do
        for _, name in ipairs(rule.remove_headers) do
            if not decided[name] then
                decided[name] = true
                if present[name] then
                    strip[#strip + 1] = name
                    record("remove_header", name, rule)
                end
            end
        end
        for _, header in ipairs(rule.set_headers) do
            if not decided[header.name] then
                decided[header.name] = true
                set[#set + 1] = header
                record("set_header", header.name, rule)
            end
        end
    end
    return strip, set
end

return M

-- Where things are in a JSON text: spans for editing, and the first fault with its position.
-- gateway/rules/scanner.py is this file in Python: same faults, same words.
-- Positions inside are Lua's, from 1; byte offsets in messages count from 0.

local byte, sub, find, char = string.byte, string.sub, string.find, string.char

local M = {}

local MAX_DEPTH = 100
-- Python refuses longer integers.
local MAX_INTEGER_DIGITS = 4300

local QUOTE, BACKSLASH, COMMA, COLON = 34, 92, 44, 58
local OPEN_BRACE, CLOSE_BRACE, OPEN_BRACKET, CLOSE_BRACKET = 123, 125, 91, 93

-- The first position from `at` on that is not white space.
local function skip_space(text, at)
    while true do
        local b = byte(text, at)
        if b ~= 32 and b ~= 10 and b ~= 13 and b ~= 9 then
            return at
        end
        at = at + 1
    end
end
M.skip_space = skip_space

-- The position behind the string that begins at `at` in valid JSON.
local function skip_string(text, at)
    at = at + 1
    while true do
        local b = byte(text, at)
        if b == QUOTE then
            return at + 1
        end
        at = at + (b == BACKSLASH and 2 or 1)
    end
end
M.skip_string = skip_string

-- The position behind the value that begins at `at` in valid JSON.
function M.skip_value(text, at)
    local b = byte(text, at)
    if b == QUOTE then
        return skip_string(text, at)
    end
    if b ~= OPEN_BRACE and b ~= OPEN_BRACKET then
        return find(text, "[ \t\n\r,%]}]", at) or #text + 1
    end
    local depth = 0
    while true do
        if b == QUOTE then
            at = skip_string(text, at)
        else
            at = at + 1
            if b == OPEN_BRACE or b == OPEN_BRACKET then
                depth = depth + 1
            elseif b == CLOSE_BRACE or b == CLOSE_BRACKET then
                depth = depth - 1
                if depth == 0 then
                    return at
                end
            end
        end
        b = byte(text, at)
    end
end

local function utf8(code)
    if code < 0x80 then
        return char(code)
    end
    if code < 0x800 then
        return char(0xC0 + math.floor(code / 0x40), 0x80 + code % 0x40)
    end
    if code < 0x10000 then
        return char(
            0xE0 + math.floor(code / 0x1000),
            0x80 + math.floor(code / 0x40) % 0x40,
            0x80 + code % 0x40
        )
    end
    return char(
        0xF0 + math.floor(code / 0x40000),
        0x80 + math.floor(code / 0x1000) % 0x40,
        0x80 + math.floor(code / 0x40) % 0x40,
        0x80 + code % 0x40
    )
end

local ESCAPES = {
    ['"'] = '"', ["\\"] = "\\", ["/"] = "/",
    b = "\b", f = "\f", n = "\n", r = "\r", t = "\t",
}

-- What a string token says, in UTF-8.
function M.decode_string(token)
    if not find(token, "\\", 2, true) then
        return sub(token, 2, -2)
    end
    local parts, at = {}, 2
    while true do
        local slash = find(token, "\\", at, true)
        if not slash then
            parts[#parts + 1] = sub(token, at, -2)
            return table.concat(parts)
        end
        parts[#parts + 1] = sub(token, at, slash - 1)
        local letter = sub(token, slash + 1, slash + 1)
        at = slash + 2
        if letter == "u" then
            local code = tonumber(sub(token, at, at + 3), 16)
            at = at + 4
            if code >= 0xD800 and code < 0xDC00 then
                local low = tonumber(sub(token, at + 2, at + 5), 16)
                code = 0x10000 + (code - 0xD800) * 0x400 + (low - 0xDC00)
                at = at + 6
            end
            parts[#parts + 1] = utf8(code)
        else
            parts[#parts + 1] = ESCAPES[letter]
        end
    end
end

-- The position of the first byte that is not UTF-8, or nil.
local function find_bad_utf8(text)
    local at, length = 1, #text
    while at <= length do
        local b = byte(text, at)
        if b < 0x80 then
            at = at + 1
        else
            local more, low, high = 0, 0x80, 0xBF
            if b >= 0xC2 and b <= 0xDF then
                more = 1
            elseif b >= 0xE0 and b <= 0xEF then
                more = 2
                if b == 0xE0 then low = 0xA0 elseif b == 0xED then high = 0x9F end
            elseif b >= 0xF0 and b <= 0xF4 then
                more = 3
                if b == 0xF0 then low = 0x90 elseif b == 0xF4 then high = 0x8F end
            else
                return at
            end
            for i = 1, more do
                local c = byte(text, at + i)
                if not c or c < low or c > high then
                    return at
                end
                low, high = 0x80, 0xBF
            end
            at = at + more + 1
        end
    end
    return nil
end

local function fault(what, at)
    error({ fault = what .. " at byte offset " .. (at - 1) }, 0)
end

local function expected(what, text, at)
    if at > #text then
        fault("the body ends too early", at)
    end
    fault("expected " .. what, at)
end

local function is_hex(b)
    return b and ((b >= 48 and b <= 57) or (b >= 65 and b <= 70) or (b >= 97 and b <= 102))
end

-- The code unit of `\uXXXX` whose backslash is at `at`, or nil.
local function unit_at(text, at)
    if byte(text, at) ~= BACKSLASH or byte(text, at + 1) ~= 117 then
        return nil
    end
    for i = at + 2, at + 5 do
        if not is_hex(byte(text, i)) then
            return nil
        end
    end
    return tonumber(sub(text, at + 2, at + 5), 16)
end

local SIMPLE_ESCAPES = {}
for letter in pairs(ESCAPES) do
    SIMPLE_ESCAPES[byte(letter)] = true
end

-- Faults of surrogates count only when the rest of the string is right.
local function check_string(text, at)
    local begin, unpaired = at, nil
    at = at + 1
    while true do
        local b = byte(text, at)
        if not b then
            fault("a string is not closed", begin)
        elseif b == QUOTE then
            break
        elseif b < 32 then
            fault("a control character in a string", at)
        elseif b ~= BACKSLASH then
            at = at + 1
        elseif SIMPLE_ESCAPES[byte(text, at + 1) or 0] then
            at = at + 2
        else
            local unit = unit_at(text, at)
            if not unit then
                fault("an unknown escape", at)
            end
            local escape = at
            at = at + 6
            if unit >= 0xD800 and unit < 0xDC00 then
                local low = unit_at(text, at)
                if low and low >= 0xDC00 and low < 0xE000 then
                    at = at + 6
                else
                    unpaired = unpaired or escape
                end
            elseif unit >= 0xDC00 and unit < 0xE000 then
                unpaired = unpaired or escape
            end
        end
    end
    if unpaired then
        fault("an unpaired surrogate", unpaired)
    end
    return at + 1
end

local function is_digit(b)
    return b and b >= 48 and b <= 57
end

local function skip_digits(text, at)
    while is_digit(byte(text, at)) do
        at = at + 1
    end
    return at
end

local function check_number(text, at)
    local begin = at
    if byte(text, at) == 45 then
        at = at + 1
    end
    local digits = at
    if byte(text, at) == 48 then
        at = at + 1
    elseif is_digit(byte(text, at)) then
        at = skip_digits(text, at)
    else
        expected("a value", text, begin)
    end
    local num_digits, is_integer = at - digits, true
    if byte(text, at) == 46 and is_digit(byte(text, at + 1)) then
        at, is_integer = skip_digits(text, at + 1), false
    end
    local b = byte(text, at)
    if b == 101 or b == 69 then
        local sign = byte(text, at + 1)
        local power = at + ((sign == 43 or sign == 45) and 2 or 1)
        if is_digit(byte(text, power)) then
            at, is_integer = skip_digits(text, power), false
        end
    end
    if is_integer then
        if num_digits > MAX_INTEGER_DIGITS then
            fault("a number is too large", begin)
        end
    elseif b == 101 or b == 69 or num_digits > 300 then
        local number = tonumber(sub(text, begin, at - 1))
        if number == math.huge or number == -math.huge then
            fault("a number is too large", begin)
        end
    end
    return at
end

local check_value

local function check_object(text, at, depth)
    local keys = {}
    at = skip_space(text, at + 1)
    if byte(text, at) == CLOSE_BRACE then
        return at + 1
    end
    while true do
        if byte(text, at) ~= QUOTE then
            expected("a key", text, at)
        end
        local last = check_string(text, at)
        local key = M.decode_string(sub(text, at, last - 1))
        if keys[key] then
            fault("a key occurs twice in one object", at)
        end
        keys[key] = true
        at = skip_space(text, last)
        if byte(text, at) ~= COLON then
            expected("':'", text, at)
        end
        at = skip_space(text, check_value(text, skip_space(text, at + 1), depth))
        local b = byte(text, at)
        if b == CLOSE_BRACE then
            return at + 1
        end
        if b ~= COMMA then
            expected("',' or '}'", text, at)
        end
        at = skip_space(text, at + 1)
    end
end

local function check_array(text, at, depth)
    at = skip_space(text, at + 1)
    if byte(text, at) == CLOSE_BRACKET then
        return at + 1
    end
    while true do
        at = skip_space(text, check_value(text, at, depth))
        local b = byte(text, at)
        if b == CLOSE_BRACKET then
            return at + 1
        end
        if b ~= COMMA then
            expected("',' or ']'", text, at)
        end
        at = skip_space(text, at + 1)
    end
end

function check_value(text, at, depth)
    local b = byte(text, at)
    if b == QUOTE then
        return check_string(text, at)
    end
    if is_digit(b) then
        return check_number(text, at)
    end
    if b == OPEN_BRACE or b == OPEN_BRACKET then
        if depth == MAX_DEPTH then
            fault("the body nests deeper than " .. MAX_DEPTH .. " levels", at)
        end
        local check = b == OPEN_BRACE and check_object or check_array
        return check(text, at, depth + 1)
    end
    local word = sub(text, at, at + 3)
    if word == "true" or word == "null" then
        return at + 4
    end
    if word == "fals" and byte(text, at + 4) == 101 then
        return at + 5
    end
    if find(text, "^NaN", at) or find(text, "^-?Infinity", at) then
        fault("NaN and Infinity are not JSON numbers", at)
    end
    return check_number(text, at)
end

-- The first fault of a body that should be a JSON object; nil when there is none.
function M.find_problem(body)
    if body == "" then
        return "the body is empty"
    end
    local bad = find_bad_utf8(body)
    if bad then
        return "the body is not valid UTF-8 at byte offset " .. (bad - 1)
    end
    if sub(body, 1, 3) == "\239\187\191" then
        return "the body begins with a byte order mark"
    end
    local at = skip_space(body, 1)
    if byte(body, at) ~= OPEN_BRACE then
        return "the body should be a JSON object"
    end
    local ok, result = pcall(check_object, body, at, 1)
    if not ok then
        if type(result) == "table" then
            return result.fault
        end
        error(result, 0)
    end
    at = skip_space(body, result)
    if at <= #body then
        return "unexpected text after the object at byte offset " .. (at - 1)
    end
    return nil
end

return M

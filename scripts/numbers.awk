# Prints the numbers of a result of helix-bench, one a line, those of nested objects as in
# "latency_us.p99 512.5". Lists and deeper objects are left out. For the JSON of helix-bench only,
# which indents each level by two spaces.
match($0, /^ +"[^"]*": /) {
    depth = int((index($0, "\"") - 1) / 2)
    if (depth > 2) next
    name[depth] = substr($0, 2 * depth + 2, RLENGTH - 2 * depth - 4)
    value = substr($0, RLENGTH + 1)
    sub(/,$/, "", value)
    if (value ~ /^-?[0-9]/) print (depth == 1 ? name[1] : name[1] "." name[2]), value
}

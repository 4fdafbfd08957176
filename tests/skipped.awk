# Lists the tests that were skipped, by reason, from what ctest logs of every test program:
#   awk -f tests/skipped.awk build/Testing/Temporary/LastTest.log
/^\[ RUN      \] / { running = $4; reason = ""; telling = 0 }
/: Skipped$/ { telling = 1; next }
telling && /^$/ { telling = 0 }
telling && !/^\[/ { reason = reason (reason == "" ? "" : " ") $0 }
/^\[  SKIPPED \] / && $4 == running {
  if (reason == "") reason = "no reason given"
  if (!(reason in total)) reasons[++reasons_seen] = reason
  ++total[reason]
  suite = running
  sub(/\.[^.]*$/, "", suite)
  if (!((reason, suite) in count)) suites[reason, ++suites_seen[reason]] = suite
  ++count[reason, suite]
  name[reason, suite] = running
  ++all
  running = ""
}
END {
  if (all) printf "\n%d tests were skipped:\n", all
  for (i = 1; i <= reasons_seen; ++i) {
    reason = reasons[i]
    line = sprintf("  %d: %s:", total[reason], reason)
    for (j = 1; j <= suites_seen[reason]; ++j) {
      suite = suites[reason, j]
      many = count[reason, suite]
      word = " " (many == 1 ? name[reason, suite] : suite " (" many ")") (j < suites_seen[reason] ? "," : "")
      if (length(line word) > 120) { print line; line = "     " }
      line = line word
    }
    print line
  }
}

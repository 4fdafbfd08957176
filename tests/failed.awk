# Prints what the tests that failed said, from what ctest logs of every test program; of a program that broke off, the test
# in which it did, or, where it was in none, its last lines:
#   awk -f tests/failed.awk build/Testing/Temporary/LastTest.log
function show(what, said) {
  if (!all++) printf "\nTests that failed:\n"
  printf "\n%s: %s\n%s", program, what, said
  named = 1
}
/^[0-9]+\/[0-9]+ Test: / { program = $3; running = ""; named = 0; lines = 0 }
{ last[lines++ % 20] = $0 }
/^\[ RUN      \] / { running = $4; said = ""; next }
/^\[       OK \] / || /^\[  SKIPPED \] / { if ($4 == running) running = ""; next }
/^\[  FAILED  \] / { if ($4 == running) { show(running " failed", said); running = "" } next }
/^<end of output>$/ { if (running != "") show(running " did not end", said); running = "" }
/^Test Failed\.$/ && !named {
  said = ""
  for (i = lines > 20 ? lines - 20 : 0; i < lines; ++i) said = said last[i % 20] "\n"
  show("failed", said)
}
running != "" { said = said $0 "\n" }

#pragma once

namespace bonfire {

// Where a section of text stands: tokens that were added to a vocabulary cut text into sections.
struct Section {
  bool first = true;       // nothing stands before it in this text
  bool continues = false;  // an earlier piece of the same document ends where it begins
};

}  // namespace bonfire

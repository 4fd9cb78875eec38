#![no_main]
genset_libfuzzer::target!(genset_fuzz::markup::reasoning_parser);

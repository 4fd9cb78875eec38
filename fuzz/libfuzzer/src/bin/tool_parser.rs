#![no_main]
genset_libfuzzer::target!(genset_fuzz::markup::tool_parser);

#![no_main]
genset_libfuzzer::target!(genset_fuzz::text::chat_template);

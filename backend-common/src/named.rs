//! `named!`: enums with named variants.

/// Defines an enum whose variants have names: `ALL`, `name`, `from_name` and `Display`; with `: FromStr` also the parser.
#[doc(hidden)]
#[macro_export]
macro_rules! named {
    (
        $(#[$attribute:meta])*
        pub enum $type:ident $(: $from:ident)? {
            $($(#[$of_variant:meta])* $variant:ident = $name:literal,)*
        }
    ) => {
        $(#[$attribute])*
        pub enum $type {
            $($(#[$of_variant])* $variant,)*
        }

        impl $type {
            /// All variants, in order.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// Returns the name in flags, on the wire, in metrics and in logs; it never changes.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// Returns the variant with this name.
            #[must_use]
            pub fn from_name(name: &str) -> ::std::option::Option<Self> {
                Self::ALL.into_iter().find(|known| known.name() == name)
            }
        }

        impl ::std::fmt::Display for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.name())
            }
        }

        $($crate::named!(@$from $type);)?
    };
    (@FromStr $type:ident) => {
        impl ::std::str::FromStr for $type {
            type Err = ::std::string::String;

            fn from_str(text: &str) -> ::std::result::Result<Self, ::std::string::String> {
                Self::from_name(text)
                    .ok_or_else(|| $crate::spelling::none_of(text, Self::ALL.map(Self::name)))
            }
        }
    };
}

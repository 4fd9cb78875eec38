//! The cases for every fleet, regardless of how its processes meet. Each case gets its own fleet.

mod apart;
mod cards;
mod chaos;
mod discovery;
mod drains;
mod freezes;
mod handover;
mod kills;
mod moves;
#[cfg(feature = "nats")]
pub(crate) mod nats;
mod outages;
mod routing;
mod secrets;
mod spread;
mod times;

pub(crate) use self::{
    apart::*, cards::*, chaos::*, discovery::*, drains::*, freezes::*, handover::*, kills::*,
    moves::*, outages::*, routing::*, secrets::*, spread::*, times::*,
};

/// Makes a module with a test for each case: `fleet_cases!(name, meeting)`; `meeting` may await. `nats` adds the cases that need
/// a fleet with a nats-server. `discovery` leaves out those in which discovery has no part, for a fleet whose transport another
/// one has, too.
macro_rules! fleet_cases {
    ($name:ident, $meeting:expr, nats) => {
        $crate::cases::fleet_cases!($name, $meeting);

        mod nats_away {
            use $crate::cases::nats as cases;

            $crate::cases::fleet_cases!(@cases $meeting,
                requests_work_again_when_nats_is_back,
            );
        }
    };
    ($name:ident, $meeting:expr, discovery) => {
        mod $name {
            use $crate::cases;

            $crate::cases::fleet_cases!(@discovery $meeting);
        }
    };
    ($name:ident, $meeting:expr) => {
        mod $name {
            use $crate::cases;

            $crate::cases::fleet_cases!(@discovery $meeting);
            $crate::cases::fleet_cases!(@cases $meeting,
                a_frontend_needs_no_files_of_the_model,
                what_had_not_begun_moves_when_its_worker_is_killed,
                what_had_begun_fails_where_nothing_may_move,
                what_had_begun_moves_when_its_worker_is_killed,
                what_had_begun_moves_twice,
                what_had_begun_moves_when_its_worker_freezes,
                what_is_left_after_the_grace_moves,
                a_rolling_restart_loses_no_answer_longer_than_the_grace,
                a_worker_that_comes_in_time_takes_the_answers_on,
                answers_end_with_an_error_when_nobody_comes,
                a_killed_frontend_cancels_its_requests,
                a_draining_worker_finishes_its_streams_and_nothing_fails,
                a_draining_frontend_finishes_its_streams,
                a_second_signal_ends_streams_with_an_error,
                a_second_signal_to_a_frontend_ends_streams_with_an_error,
                least_loaded_spreads_load,
                power_of_two_spreads_load,
                a_prompt_goes_where_it_is_cached,
                requests_of_one_key_go_where_the_first_went,
                either_leg_may_be_killed,
                a_prefill_that_dies_with_prompts_under_way_loses_none,
                an_empty_pool_falls_back_and_comes_back,
                pools_are_rolled_under_load,
                either_side_of_a_fetch_may_be_killed,
                blocks_whose_lease_ends_are_computed_anew,
                what_had_begun_moves_when_its_decode_worker_freezes,
            );
        }
    };
    // Who is found, and what happens when that changes late or not at all.
    (@discovery $meeting:expr) => {
        $crate::cases::fleet_cases!(@cases $meeting,
            workers_and_frontend_find_each_other,
            a_listed_model_is_routable_from_the_first_moment,
            a_model_goes_with_its_last_worker_and_comes_back,
            a_frontend_that_comes_after_a_death_serves_at_once,
            no_request_fails_after_an_idle_worker_was_killed,
            a_rolling_restart_fails_nothing,
            a_frozen_worker_is_left_out_and_comes_back,
            a_worker_frozen_past_its_lease_comes_back,
            traffic_outlives_discovery_that_is_gone,
            traffic_outlives_discovery_that_is_stuck,
            a_frontend_with_another_secret_serves_nothing,
            workers_whose_cards_disagree_are_kept_apart,
            chaos_loses_nothing,
            chaos_loses_nothing_of_two_pools,
            deaths_and_births_take_a_while,
            prefill_and_decode_answer_as_one,
            real_blocks_go_over_the_wire_and_none_stays,
        );
    };
    (@cases $meeting:expr, $($case:ident,)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                cases::$case($crate::fleet::Fleet::new($meeting)).await;
            }
        )*
    };
}
pub(crate) use fleet_cases;

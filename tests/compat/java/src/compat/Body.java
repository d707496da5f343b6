package compat;

/** What a scenario does. It passes by returning, fails by throwing, and is skipped by throwing {@link Unsupported}. */
interface Body {
    void act(Run run) throws Exception;
}

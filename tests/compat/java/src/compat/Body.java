package compat;

/** A scenario's code. It passes if it returns, fails if it throws, and is skipped if it throws {@link Unsupported}. */
interface Body {
    void act(Run run) throws Exception;
}

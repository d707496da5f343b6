package compat;

/** The scenario cannot run here. The message says why. */
final class Unsupported extends RuntimeException {
    private static final long serialVersionUID = 1L;

    Unsupported(String reason) {
        super(reason);
    }
}

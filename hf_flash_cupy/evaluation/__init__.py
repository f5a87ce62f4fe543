"""Perplexity as a library: several attention implementations on the same windows of the same text.

    from hf_flash_cupy.evaluation.evaluate import Observer, Settings, evaluate

In the order of the data: ``demo`` and ``data`` (text, prefix, tokens), ``model`` (loading, switching),
``protocols`` (windows), ``probes`` (what must hold first), ``runner`` with ``scoring`` and ``meters`` (the
loop), ``report`` with ``statistics``, ``facts`` and ``schema`` (what comes out), ``gates`` (verdict),
``render`` (for people), ``evaluate`` (from ``Settings`` to ``Report``), ``command`` with ``options`` and
``outcome`` (exit codes).
"""
